"""POST /v1/audio/generate, as vLLM-Omni has it: the answer is the file. Speech needs a model that no server has yet."""

from __future__ import annotations

import json
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omni_grpc.gate.refusals import refused
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import Unimplemented
from omni_grpc.types.request_options import AUDIO
from omni_grpc.v1 import generation_pb2
from omni_grpc.web.openai.body import read_body
from omni_grpc.web.openai.endpoint import Endpoints
from omni_grpc.web.openai.fields import AUDIOS
from omni_grpc.web.openai.making import Maker, attended
from omni_grpc.web.openai.reading import Reading


class Sounds:
    """Sound from a prompt."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker

    def routes(self, endpoints: Endpoints) -> Iterator[Route]:
        yield endpoints.route("POST", "audio/generate", "GenerationService/GenerateAudio", self._generate)
        yield endpoints.route("POST", "audio/speech", "GenerationService/GenerateAudio", self._speech)

    async def _generate(self, request: Request, caller: Caller) -> Response:
        body = await read_body(request, self._maker.most)
        reading = await self._maker.read(caller, body, AUDIO, generation_pb2.GenerateAudioRequest(), AUDIOS)
        if reading.message.sampling.num_outputs > 1 or len(reading.message.sampling.seeds) > 1:
            raise reading.renamed(refused("sampling.num_outputs", "the answer is one file; send several calls"))
        return await attended(request.receive, self._file(request, caller, reading))

    async def _file(self, request: Request, caller: Caller, reading: Reading) -> Response:
        async with self._maker.job(request, caller, reading, waits=True) as made:
            artifact, *_ = await self._maker.finished(caller, made)
            data = await self._maker.bytes(caller, artifact)
        headers = {
            "cache-control": "no-store",
            "x-job-id": made.job.id,
            "x-seed": str(artifact.seed),
            # the body is the file, so that there is no other place
            "x-warnings": json.dumps(made.warnings),
        }
        return Response(data, media_type=artifact.mime_type, headers=headers)

    async def _speech(self, request: Request, caller: Caller) -> Response:
        raise Unimplemented(
            "speech is not served: no model here reads a text aloud; POST /v1/audio/generate makes sound from a "
            "description",
            metadata={"method": "/v1/audio/speech"},
        )
