"""The event stream that a watcher of one job receives."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

from omni_grpc.engine import Engine, Job
from omni_grpc.server.follow import follow
from omni_grpc.server.messages import Messages
from omni_grpc.types.events import ArtifactReady
from omni_grpc.v1 import event_pb2


class JobWatch:
    """Turns the log of a job into the events of a stream."""

    def __init__(self, engine: Engine, messages: Messages) -> None:
        self._engine = engine
        self._messages = messages
        self._heartbeat = engine.config.server.heartbeat_interval

    async def events(
        self, job: Job, after_seq: int, *, inline: bool, interval: float, previews: bool = True
    ) -> AsyncGenerator[event_pb2.JobEvent]:
        """Events with a greater seq until the job has ended, a heartbeat in every silence, and with `inline` the bytes.

        `interval` is in seconds, see `Pace`. Close it (aclosing) when the watcher leaves.
        """
        updates = follow(self._engine, job, after_seq, interval=interval, heartbeat=self._heartbeat)
        async with aclosing(updates):
            async for update in updates:
                if update is None:
                    yield self._messages.heartbeat(job)
                    continue
                yield self._messages.event(job, update, previews=previews)
                if inline and isinstance(update.entry.event, ArtifactReady):
                    for event in self._messages.chunk_events(job, update, update.entry.event.artifact):
                        yield event


class Newcomers:
    """Tells new jobs from those that a watch has already. It remembers no job longer than the server does."""

    def __init__(self, known: Iterable[Job]) -> None:
        self._known = {job.id for job in known}

    def __len__(self) -> int:
        return len(self._known)

    def among(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of all jobs that are watched (newest first) that were not there before, the oldest first."""
        found = [job for job in reversed(jobs) if job.id not in self._known]
        # a job that is gone does not come back
        self._known = {job.id for job in jobs}
        return found
