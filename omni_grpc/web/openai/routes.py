"""All of it, as routes of the HTTP port."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from omni_grpc.gate import EngineState, Gate
from omni_grpc.server.server import Backend
from omni_grpc.web.files import Files
from omni_grpc.web.openai.attempts import Attempts
from omni_grpc.web.openai.audio import Sounds
from omni_grpc.web.openai.endpoint import Endpoints
from omni_grpc.web.openai.images import Images
from omni_grpc.web.openai.making import Maker
from omni_grpc.web.openai.models import Models
from omni_grpc.web.openai.videos import Videos


def openai_routes(backend: Backend, files: Files) -> Iterator[Route]:
    """OpenAI's paths below /v1, and /health."""
    endpoints, attempts = Endpoints(backend.calls), Attempts()
    maker = Maker(backend, attempts)
    yield from Images(backend, maker).routes(endpoints)
    yield from Videos(maker, files, attempts).routes(endpoints)
    yield from Sounds(maker).routes(endpoints)
    yield from Models(backend.gate).routes(endpoints)
    yield endpoints.others()
    yield Route("/health", Health(backend.gate), methods=["GET", "HEAD"])


class Health:
    """Whether jobs are taken: 200 or 503. Whoever asks need not say who they are, since probes do not."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._gate.state
        status = 200 if state is EngineState.READY else 503
        await JSONResponse({"status": state.lower()}, status, {"cache-control": "no-store"})(scope, receive, send)
