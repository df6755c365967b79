"""GenerationService: one generation per call, with its events on the same stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from omni_grpc.engine import Job
from omni_grpc.errors import Cancelled
from omni_grpc.request import Cancelled as CancelledEvent
from omni_grpc.request import Task
from omni_grpc.server.intake import Intake
from omni_grpc.server.requests import read_image
from omni_grpc.server.tasks import edit_task, video_task
from omni_grpc.server.watch import Watch
from omni_grpc.v1 import generation_pb2, generation_pb2_grpc


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Every rpc is CreateJob and WatchJob in one; the failure of the job is that of the call."""

    def __init__(self, intake: Intake, watch: Watch) -> None:
        self._intake = intake
        self._watch = watch

    async def GenerateImage(
        self, request: generation_pb2.GenerateImageRequest, context: Any
    ) -> AsyncGenerator[generation_pb2.GenerateImageResponse]:
        asked = read_image(request, streaming=True)
        job, _ = self._intake.submit(asked.submission)
        async with aclosing(self._watch.events(job, 0, inline=asked.inline, interval=asked.interval)) as events:
            async for event in events:
                yield generation_pb2.GenerateImageResponse(event=event)
        raise_outcome(job)

    def EditImage(self, request: generation_pb2.EditImageRequest, context: Any) -> AsyncGenerator[Any]:
        return self._refused(request.model, request.prompt, edit_task(request))

    def GenerateVideo(self, request: generation_pb2.GenerateVideoRequest, context: Any) -> AsyncGenerator[Any]:
        return self._refused(request.model, request.prompt, video_task(request))

    def GenerateAudio(self, request: generation_pb2.GenerateAudioRequest, context: Any) -> AsyncGenerator[Any]:
        return self._refused(request.model, request.prompt, Task.TEXT_TO_AUDIO)

    async def _refused(self, model: str, prompt: str, task: Task) -> AsyncGenerator[Any]:
        self._intake.refuse(model, prompt, task)
        yield  # never reached: it makes this a stream, as every answer of this service is


def raise_outcome(job: Job) -> None:
    """Raises what a finished job ended with, unless it succeeded."""
    if job.failure is not None:
        raise job.failure.error()
    last = job.entries[-1].event
    if isinstance(last, CancelledEvent):
        raise Cancelled(
            f"job {job.id} was cancelled after {last.completed_steps} steps: {last.reason}",
            reason="JOB_CANCELLED",
            metadata={"job_id": job.id},
        )
