"""GenerationService: one generation per call, with its events on the same stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from google.protobuf.message import Message

from omni_grpc.gate import Gate
from omni_grpc.gate.jobs import raise_outcome
from omni_grpc.server.intake import submit
from omni_grpc.server.requests import GenerationRequest
from omni_grpc.server.watch import JobWatch
from omni_grpc.types.caller import Caller
from omni_grpc.v1 import generation_pb2, generation_pb2_grpc

T = TypeVar("T", bound=Message)


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Every rpc is CreateJob and WatchJob in one; if the job fails, so does the call."""

    def __init__(self, gate: Gate, watch: JobWatch) -> None:
        self._gate = gate
        self._watch = watch

    def GenerateImage(
        self, request: generation_pb2.GenerateImageRequest, caller: Caller
    ) -> AsyncGenerator[generation_pb2.GenerateImageResponse]:
        return self._generate(request, caller, generation_pb2.GenerateImageResponse)

    def EditImage(
        self, request: generation_pb2.EditImageRequest, caller: Caller
    ) -> AsyncGenerator[generation_pb2.EditImageResponse]:
        return self._generate(request, caller, generation_pb2.EditImageResponse)

    def GenerateVideo(
        self, request: generation_pb2.GenerateVideoRequest, caller: Caller
    ) -> AsyncGenerator[generation_pb2.GenerateVideoResponse]:
        return self._generate(request, caller, generation_pb2.GenerateVideoResponse)

    def GenerateAudio(
        self, request: generation_pb2.GenerateAudioRequest, caller: Caller
    ) -> AsyncGenerator[generation_pb2.GenerateAudioResponse]:
        return self._generate(request, caller, generation_pb2.GenerateAudioResponse)

    async def _generate(self, request: GenerationRequest, caller: Caller, response: type[T]) -> AsyncGenerator[T]:
        accepted = await submit(self._gate, caller, request, streaming=True)
        job, asked = accepted.job, accepted.asked
        events = self._watch.events(caller, job.id, 0, delivery=asked.delivery, interval=asked.interval)
        async with aclosing(events):
            async for event in events:
                yield response(event=event)
        raise_outcome(job)
