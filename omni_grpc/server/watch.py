"""The event stream that a watcher of one job receives."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from omni_grpc.gate import Delivery, Gate
from omni_grpc.server.messages import Messages
from omni_grpc.types.caller import Caller
from omni_grpc.types.events import ArtifactReady, Completed, Event
from omni_grpc.v1 import event_pb2


class JobWatch:
    """Turns the log of a job into the events of a stream."""

    def __init__(self, gate: Gate, messages: Messages) -> None:
        self._gate = gate
        self._messages = messages

    async def events(
        self,
        caller: Caller,
        job_id: str,
        after_seq: int,
        *,
        delivery: Delivery,
        interval: float,
        previews: bool = True,
    ) -> AsyncGenerator[event_pb2.JobEvent]:
        """Events with a greater seq until the job has ended, a heartbeat in every silence, and outputs by `delivery`.

        `interval` is in seconds, see `Pace`. Close it (aclosing) when the watcher leaves.
        """
        job = await self._gate.jobs.get(caller, job_id, action="WatchJob")
        updates = self._gate.jobs.watch(caller, job_id, after_seq, interval=interval)
        async with aclosing(updates):
            async for update in updates:
                if update is None:
                    yield self._messages.heartbeat(job)
                    continue
                message = self._messages.event(job, update, previews=previews)
                if delivery is Delivery.SIGNED_URL:
                    await self._sign(update.entry.event, message)
                yield message
                if delivery is Delivery.INLINE_CHUNKS and isinstance(update.entry.event, ArtifactReady):
                    chunks = self._gate.files.chunks(caller, update.entry.event.artifact.artifact_id)
                    async with aclosing(chunks):
                        async for chunk in chunks:
                            yield self._messages.chunk_event(job, update, chunk)

    async def _sign(self, event: Event, message: event_pb2.JobEvent) -> None:
        """Gives the outputs of an event their addresses."""
        match event:
            case ArtifactReady(artifact=artifact):
                message.artifact_ready.artifact.download_uri = await self._gate.files.signed_url(artifact)
            case Completed(artifacts=artifacts):
                for artifact, shown in zip(artifacts, message.completed.artifacts, strict=True):
                    shown.download_uri = await self._gate.files.signed_url(artifact)
