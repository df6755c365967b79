"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from omni_grpc.gate import Gate, ModelView
from omni_grpc.types.caller import Caller
from omni_grpc.web.openai.endpoint import Endpoints


class Models:
    """The models that the caller can name."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._since = int(time.time())

    def routes(self, endpoints: Endpoints) -> Iterator[Route]:
        yield endpoints.route("GET", "models", "ModelService/ListModels", self._list)
        yield endpoints.route("GET", "models/{name:path}", "ModelService/GetModel", self._retrieve)

    async def _list(self, request: Request, caller: Caller) -> Response:
        return JSONResponse(
            {"object": "list", "data": [self._shown(view) for view in self._gate.models.served(caller)]}
        )

    async def _retrieve(self, request: Request, caller: Caller) -> Response:
        return JSONResponse(self._shown(self._gate.models.get(caller, request.path_params["name"])))

    def _shown(self, view: ModelView) -> dict[str, Any]:
        """OpenAI's fields, then what the model makes and whether it takes jobs."""
        return {
            "id": view.checkpoint.name,
            "object": "model",
            # when this server began to serve it, as far as it knows
            "created": self._since,
            "owned_by": "omni_grpc",
            "tasks": list(view.checkpoint.tasks),
            "state": view.state.lower(),
        }
