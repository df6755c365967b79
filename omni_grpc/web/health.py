"""Probes over plain HTTP: /healthz, whether the process is worth keeping, and /readyz, whether jobs are taken. Whoever
asks need not say who they are, since probes do not; so where callers do, nothing is told that is not in the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from omni_grpc.gate import EngineState, Gate
from omni_grpc.types.load_progress import Loading

UNCACHED: Mapping[str, str] = {"cache-control": "no-store"}


def probe_routes(gate: Gate, *, identified: bool) -> Iterator[Route]:
    """The routes. `identified`: callers say who they are, so that names of models are not for everybody."""
    probes = Probes(gate, identified=identified)
    yield Route("/healthz", probes.alive, methods=["GET", "HEAD"])
    yield Route("/readyz", probes.ready, methods=["GET", "HEAD"])


class Probes:
    """They say what `grpc.health.v1` says."""

    def __init__(self, gate: Gate, *, identified: bool) -> None:
        self._gate = gate
        self._identified = identified

    async def alive(self, request: Request) -> Response:
        """As the service `liveness`: a worker that died is started again, a model that never loaded ends the server."""
        failed = self._gate.state is EngineState.FAILED
        return JSONResponse({"status": "failed" if failed else "alive"}, 503 if failed else 200, UNCACHED)

    async def ready(self, request: Request) -> Response:
        """As the service of a model, with `?model=NAME`, or as that of the server."""
        name = request.query_params.get("model")
        serving, loading = self._gate.serving, self._gate.loading
        if name is None:
            state = self._gate.state
            ready = state is EngineState.READY
            body: dict[str, Any] = {"status": "ready" if ready else state.lower()}
            if not self._identified:
                body["models"] = {one: _told(takes, loading.get(one)) for one, takes in serving.items()}
        elif name not in serving:
            return JSONResponse({"status": "unknown", "model": name}, 404, UNCACHED)
        else:
            ready = serving[name]
            body = {"model": name, **_told(ready, loading.get(name))}
        return JSONResponse(body, 200 if ready else 503, UNCACHED)


def _told(ready: bool, loading: Loading | None) -> dict[str, Any]:
    if loading is None:
        return {"status": "ready" if ready else "not ready"}
    told: dict[str, Any] = {"status": "ready" if ready else "loading", "phase": str(loading)}
    if loading.total_bytes:
        told |= {"done_bytes": loading.done_bytes, "total_bytes": loading.total_bytes}
    return told
