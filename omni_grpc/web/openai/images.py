"""POST /v1/images/generations and /v1/images/edits."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from omni_grpc.gate.refusals import refused
from omni_grpc.server.messages import Messages
from omni_grpc.server.requests import PREVIEW_FORMATS
from omni_grpc.server.server import Backend
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import Failure
from omni_grpc.types.events import StepProgress
from omni_grpc.types.request_options import EDIT, IMAGE
from omni_grpc.types.results import Artifact
from omni_grpc.v1 import generation_pb2, media_pb2, options_pb2
from omni_grpc.web.openai import errors
from omni_grpc.web.openai.body import Body, read_body
from omni_grpc.web.openai.endpoint import Endpoints
from omni_grpc.web.openai.fields import EDITS, GENERATIONS
from omni_grpc.web.openai.making import Made, Maker, attended
from omni_grpc.web.openai.reading import Fields, Reading

PREVIEW_EDGE = 512
"""Longer side of a partial image in pixels, at most: that of the largest preview."""
NO_TOKENS: Mapping[str, Any] = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}
"""`usage` of a stream, which has to have one: nothing is counted in tokens here."""


class Images:
    """Pictures, from a prompt or from pictures."""

    def __init__(self, backend: Backend, maker: Maker) -> None:
        self._maker = maker
        self._messages: Messages = backend.messages

    def routes(self, endpoints: Endpoints) -> Iterator[Route]:
        yield endpoints.route("POST", "images/generations", "GenerationService/GenerateImage", self._generate)
        yield endpoints.route("POST", "images/edits", "GenerationService/EditImage", self._edit)

    async def _generate(self, request: Request, caller: Caller) -> Response:
        return await self._make(request, caller, IMAGE, generation_pb2.GenerateImageRequest, GENERATIONS)

    async def _edit(self, request: Request, caller: Caller) -> Response:
        return await self._make(request, caller, EDIT, generation_pb2.EditImageRequest, EDITS)

    async def _make(
        self, request: Request, caller: Caller, kind: str, message: Callable[[], Any], fields: Fields
    ) -> Response:
        body = await read_body(request, self._maker.most)
        reading = await self._maker.read(caller, body, kind, message(), fields)
        if not reading.reply.get("stream"):
            if reading.reply.get("partial_images"):
                reading.warn("partial_images", "FIELD_WITHOUT_EFFECT", "has no effect without stream", "")
            return await attended(request.receive, self._whole(request, caller, reading))
        self._prepare_stream(caller, body, reading)
        return Stream(self, request, caller, reading, "image_generation" if kind == IMAGE else "image_edit")

    async def _whole(self, request: Request, caller: Caller, reading: Reading) -> Response:
        async with self._maker.job(request, caller, reading, waits=True) as made:
            artifacts = await self._maker.finished(caller, made)
            data = [await self._entry(caller, one, reading.reply.get("response_format") == "url") for one in artifacts]
        job = made.job
        content = {
            "created": int(job.record.end_time or job.record.create_time),
            "data": data,
            "model": job.request.model,
            **_described(artifacts[0]),
            "job_id": job.id,
            "inference_time_s": job.stats.total - job.stats.queue_wait if job.stats else None,
            "warnings": made.warnings,
        }
        return JSONResponse(content, headers={"cache-control": "no-store"})

    async def _entry(self, caller: Caller, artifact: Artifact, by_url: bool) -> dict[str, Any]:
        entry: dict[str, Any] = {"seed": artifact.seed}
        if artifact.layer is not None:
            entry["layer"] = artifact.layer
        if by_url:
            return entry | {"url": await self._maker.gate.files.signed_url(artifact)}
        return entry | {"b64_json": await self._maker.base64(caller, artifact)}

    # --- streams ------------------------------------------------------------------------------------------------------

    def _prepare_stream(self, caller: Caller, body: Body, reading: Reading) -> None:
        message = reading.message
        if message.sampling.num_outputs > 1 or len(message.sampling.seeds) > 1:
            field = "sampling.num_outputs" if message.sampling.num_outputs > 1 else "sampling.seeds"
            why = "a stream has one image, since its events do not say which of several they are of"
            raise reading.renamed(refused(field, f"{why}; send several calls, or leave stream out"))
        if reading.reply.get("response_format") == "url":
            raise refused("response_format", "a stream has b64_json alone; leave it out")
        if not (count := reading.reply.get("partial_images", 0)):
            return
        steps = message.sampling.steps or self._maker.usual_steps(caller, body, message)
        preview = message.options.preview
        preview.method = options_pb2.PREVIEW_METHOD_LATENT_RGB
        preview.every_steps = max(1, math.ceil(steps / (count + 1)))
        # a preview is scaled to its edge: one that is larger than the image shows nothing more
        longest = max(message.width, message.height)
        preview.max_edge_px = min(PREVIEW_EDGE, longest) if message.width and message.height else PREVIEW_EDGE
        wanted = message.output_format or media_pb2.IMAGE_FORMAT_PNG
        preview.format = wanted if wanted in PREVIEW_FORMATS else media_pb2.IMAGE_FORMAT_PNG

    async def send(self, request: Request, caller: Caller, reading: Reading, prefix: str, send: Send) -> None:
        """Makes the job and sends its stream. What is refused is raised before anything is sent."""
        async with self._maker.job(request, caller, reading, waits=True) as made:
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
            headers["x-job-id"] = made.job.id
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            async with aclosing(self._events(caller, made, prefix)) as events:
                async for text in events:
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _events(self, caller: Caller, made: Made, prefix: str) -> AsyncGenerator[str]:
        """The stream of a job, as text. Raises the failure of the job."""
        yield comment(f"job {made.job.id}")
        job, count, most = made.job, 0, made.reading.reply.get("partial_images", 0)
        async with aclosing(self._maker.updates(caller, made)) as updates:
            async for update in updates:
                if update is None:
                    yield comment("heartbeat")
                    continue
                step = update.entry.event
                # the picture after the last step is on its way
                if not isinstance(step, StepProgress) or step.step == step.total_steps or count == most:
                    continue
                for preview in self._messages.event(job, update).step_progress.previews:
                    content = {
                        "b64_json": base64.b64encode(preview.data).decode(),
                        "partial_image_index": count,
                        **_common(preview.mime_type, preview.width, preview.height, made),
                    }
                    count += 1
                    yield event(f"{prefix}.partial_image", content)
        self._maker.outcome(job)
        for artifact in job.artifacts:
            content = await self._entry(caller, artifact, False)
            content |= _common(artifact.mime_type, artifact.width, artifact.height, made)
            content |= {"usage": NO_TOKENS, "model": job.request.model, "job_id": job.id, "warnings": made.warnings}
            yield event(f"{prefix}.completed", content)


class Stream(Response):
    """Server-sent events about a job, which ends with its client."""

    def __init__(self, images: Images, request: Request, caller: Caller, reading: Reading, prefix: str) -> None:
        super().__init__()
        self._images = images
        self._request = request
        self._caller = caller
        self._reading = reading
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = self._images.send(self._request, self._caller, self._reading, self._prefix, send)
        await attended(receive, sent)

    async def interrupted(self, failure: Failure, send: Send) -> None:
        """Ends the stream with a failure, which the official clients raise."""
        text = event("error", {"error": errors.error(failure)})
        await send({"type": "http.response.body", "body": text.encode()})


def comment(text: str) -> str:
    """What clients pass over, and proxies see as a sign of life."""
    return f": {text}\n\n"


def event(name: str, content: dict[str, Any]) -> str:
    data = content if name == "error" else {"type": name, **content}
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _common(mime_type: str, width: int, height: int, made: Made) -> dict[str, Any]:
    return {
        "created_at": int(made.job.record.create_time),
        "size": f"{width}x{height}",
        "quality": "auto",
        "background": "auto",
        "output_format": _format(mime_type),
    }


def _described(artifact: Artifact) -> dict[str, Any]:
    return {
        "output_format": _format(artifact.mime_type),
        "size": f"{artifact.width}x{artifact.height}",
        "background": "transparent" if artifact.has_alpha else "opaque",
    }


def _format(mime_type: str) -> str:
    kind, _, name = mime_type.partition("/")
    return name if kind == "image" else "raw_rgb8"
