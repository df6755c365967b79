"""GenerationService: one generation per call, with its events on the same stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message

from omni_grpc.engine import Job
from omni_grpc.server.intake import Intake
from omni_grpc.server.requests import GenerationRequest
from omni_grpc.server.watch import JobWatch
from omni_grpc.types.errors import OperationCancelled
from omni_grpc.types.events import Cancelled as CancelledEvent
from omni_grpc.v1 import generation_pb2, generation_pb2_grpc

T = TypeVar("T", bound=Message)


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Every rpc is CreateJob and WatchJob in one; if the job fails, so does the call."""

    def __init__(self, intake: Intake, watch: JobWatch) -> None:
        self._intake = intake
        self._watch = watch

    def GenerateImage(
        self, request: generation_pb2.GenerateImageRequest, context: Any
    ) -> AsyncGenerator[generation_pb2.GenerateImageResponse]:
        return self._generate(request, generation_pb2.GenerateImageResponse)

    def EditImage(
        self, request: generation_pb2.EditImageRequest, context: Any
    ) -> AsyncGenerator[generation_pb2.EditImageResponse]:
        return self._generate(request, generation_pb2.EditImageResponse)

    def GenerateVideo(
        self, request: generation_pb2.GenerateVideoRequest, context: Any
    ) -> AsyncGenerator[generation_pb2.GenerateVideoResponse]:
        return self._generate(request, generation_pb2.GenerateVideoResponse)

    def GenerateAudio(
        self, request: generation_pb2.GenerateAudioRequest, context: Any
    ) -> AsyncGenerator[generation_pb2.GenerateAudioResponse]:
        return self._generate(request, generation_pb2.GenerateAudioResponse)

    async def _generate(self, request: GenerationRequest, response: type[T]) -> AsyncGenerator[T]:
        accepted = await self._intake.submit(request, streaming=True)
        job, asked = accepted.job, accepted.asked
        async with aclosing(self._watch.events(job, 0, inline=asked.inline, interval=asked.interval)) as events:
            async for event in events:
                yield response(event=event)
        raise_outcome(job)


def raise_outcome(job: Job) -> None:
    """Raises the failure or cancellation that a finished job ended with, if any."""
    if job.failure is not None:
        raise job.failure.error()
    last = job.entries[-1].event
    if isinstance(last, CancelledEvent):
        raise OperationCancelled(
            f"job {job.id} was cancelled after {last.completed_steps} steps: {last.reason}",
            reason="JOB_CANCELLED",
            metadata={"job_id": job.id},
        )
