"""The one way in for new jobs, so that those who follow the whole server learn of each."""

from __future__ import annotations

from typing import NoReturn

from omni_grpc.engine import Engine, Job, Submission
from omni_grpc.errors import Unimplemented
from omni_grpc.request import Draft, Task
from omni_grpc.resolve import Facts, resolve_request
from omni_grpc.server.changes import Changes


class Intake:
    """Hands requests to the engine and notifies `changes` of every new job."""

    def __init__(self, engine: Engine, changes: Changes) -> None:
        self._engine = engine
        self._changes = changes

    def submit(self, submission: Submission) -> tuple[Job, bool]:
        """The job, and True where an earlier call had made it. Raises every refusal."""
        job, deduplicated = self._engine.submit(submission)
        if not deduplicated:
            self._changes.notify()
        return job, deduplicated

    def refuse(self, model: str, prompt: str, task: Task) -> NoReturn:
        """Raises NotFound for an unknown model, FailedPrecondition for a task that it lacks, else Unimplemented."""
        draft = Draft(model=model, prompt=prompt, task=task)
        resolve_request(draft, Facts(self._engine.checkpoint, self._engine.config.limits), id="")
        raise Unimplemented(f"model {model!r} can do {task}, but this server does not serve that task yet")
