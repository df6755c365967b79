"""The single entry point for new jobs, so that watchers of the whole server learn of each."""

from __future__ import annotations

import dataclasses

from omni_grpc.engine import Engine, Job, Submission
from omni_grpc.gate.ask import Ask
from omni_grpc.gate.audit import Audit, about_job
from omni_grpc.gate.changes import Changes
from omni_grpc.gate.media import MediaReader
from omni_grpc.gate.options import Asked, read
from omni_grpc.gate.quotas import Quotas
from omni_grpc.gate.stored import Stored
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.media import Inputs
from omni_grpc.types.request import Task


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """A job, what its caller asked for, and whether an earlier call with the same request_id had made it."""

    job: Job
    asked: Asked
    deduplicated: bool


class Intake:
    """Hands requests to the engine and notifies `changes` of every new job."""

    def __init__(self, engine: Engine, changes: Changes, stored: Stored, quotas: Quotas, audit: Audit) -> None:
        self._engine = engine
        self._quotas = quotas
        self._audit = audit
        self._changes = changes
        self._media = MediaReader(engine, stored)

    def close(self) -> None:
        """Ends what it has started."""
        self._media.close()

    def check(self, caller: Caller, model: str, task: Task) -> None:
        """What is known without a look at the rest of a request, which a stack may ask before it translates a large
        one. Raises PermissionDenied, NotFound for a model that is not served (an empty name is that of the only one),
        FailedPrecondition for a task that it lacks, Unavailable before it is loaded.
        """
        with self._audit.refusals(caller, "CreateJob", model=model, task=task):
            self._check(caller, model, task)

    def _check(self, caller: Caller, model: str, task: Task) -> None:
        caller.require(Scope.GENERATE)
        self._engine.check(model, task)

    async def submit(self, caller: Caller, ask: Ask) -> Accepted:
        """Makes a job of a request. Raises every refusal. Those that need nothing of what is in the media come
        first: the caller's scope, the state of the server, the rules, the queue.
        """
        with self._audit.action(caller, "CreateJob", model=ask.draft.model, task=ask.draft.task) as line:
            accepted = await self._accept(caller, ask)
            line |= about_job(accepted.job) | {"deduplicated": accepted.deduplicated}
        return accepted

    async def _accept(self, caller: Caller, ask: Ask) -> Accepted:
        await self._quotas.refresh()
        self._check(caller, ask.draft.model, ask.draft.task)
        asked = read(ask, caller)
        submission, inputs = asked.submission, Inputs()
        if self._engine.check_submission(submission) is None:
            self._quotas.check(submission)
            inputs, notes = await self._media.read(caller, ask.media)
            draft = dataclasses.replace(submission.draft, inputs=inputs)
            submission = dataclasses.replace(submission, draft=draft, warnings=notes)
        try:
            job, deduplicated = self._submit(submission)
        except BaseException:
            self._engine.inputs.free(inputs)
            raise
        if deduplicated:
            # another call with this request_id was first, perhaps while the media of this one were decoded
            self._engine.inputs.free(inputs)
        else:
            self._changes.notify()
            if not ask.streaming and submission.cancel_on_disconnect:
                # nobody watches yet, so the disconnect grace runs from here on
                with self._engine.watching(job):
                    pass
        return Accepted(job, asked, deduplicated)

    def _submit(self, submission: Submission) -> tuple[Job, bool]:
        """In one go, so that no other call comes between a check of the quotas and the job that is charged for."""
        tenant = submission.tenant
        job, deduplicated = self._engine.submit(
            submission, approve=lambda request: self._quotas.check_work(tenant, request)
        )
        if not deduplicated:
            self._quotas.charge(tenant, job.request)
        return job, deduplicated
