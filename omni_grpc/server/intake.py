"""The single entry point for new jobs, so that watchers of the whole server learn of each."""

from __future__ import annotations

import asyncio
import dataclasses

from omni_grpc.engine import Engine, Job, Submission
from omni_grpc.server.changes import Changes
from omni_grpc.server.media import MediaReader, expected
from omni_grpc.server.requests import Asked, GenerationRequest, read
from omni_grpc.server.tasks import task_of
from omni_grpc.types.media import Inputs

LARGE = 1 << 20
"""Bytes from which a request is read in a thread, so that the events of other jobs do not wait for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """A job, what its caller asked for, and whether an earlier call with the same request_id had made it."""

    job: Job
    asked: Asked
    deduplicated: bool


class Intake:
    """Hands requests to the engine and notifies `changes` of every new job."""

    def __init__(self, engine: Engine, changes: Changes) -> None:
        self._engine = engine
        self._changes = changes
        self._media = MediaReader(engine)

    def close(self) -> None:
        """Ends what it has started."""
        self._media.close()

    async def submit(self, request: GenerationRequest, *, streaming: bool) -> Accepted:
        """Makes a job of a request. Raises every refusal. Those that need nothing of what is in the media come
        first: the state of the server, the rules, the queue.
        """
        task = task_of(request)
        self._engine.check(request.model, task)
        if request.ByteSize() > LARGE:
            asked = await asyncio.to_thread(read, request, task, streaming=streaming)
        else:
            asked = read(request, task, streaming=streaming)
        submission = asked.submission
        if self._engine.check_submission(_with(submission, expected(request))) is None:
            inputs, notes = await self._media.read(request)
            submission = dataclasses.replace(_with(submission, inputs), warnings=notes)
        try:
            job, deduplicated = self._engine.submit(submission)
        except BaseException:
            self._engine.inputs.free(submission.draft.inputs)
            raise
        if deduplicated:
            # another call with this request_id was first, while the media of this one were decoded
            self._engine.inputs.free(submission.draft.inputs)
        if not deduplicated:
            self._changes.notify()
        return Accepted(job, asked, deduplicated)


def _with(submission: Submission, inputs: Inputs) -> Submission:
    return dataclasses.replace(submission, draft=dataclasses.replace(submission.draft, inputs=inputs))
