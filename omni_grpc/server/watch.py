"""What a watcher of one job is sent."""

from __future__ import annotations

from collections.abc import AsyncGenerator
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
