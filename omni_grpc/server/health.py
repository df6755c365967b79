"""grpc.health.v1: readiness for jobs ("" and each service, and each model as "model:NAME"), and "liveness", which fails
if no worker ever loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from omni_grpc.gate import EngineState, Gate

LIVENESS = "liveness"
OVERALL = ""
MODEL = "model:"
"""What the name of a model has in front as a service of its own."""


class Health:
    """Keeps the health service in step with the fleet."""

    def __init__(self, gate: Gate, services: Sequence[str]) -> None:
        self.servicer = health_aio.HealthServicer()
        self._gate = gate
        self._services = (OVERALL, *services)
        self._models: set[str] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._publish()
        self._gate.on_state.append(self._on_state)
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Publishes the last state and stops observing the fleet. Idempotent."""
        if self._task is None:
            return
        self._gate.on_state.remove(self._on_state)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        await self._publish()

    def _on_state(self, state: EngineState) -> None:
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._publish()

    async def _publish(self) -> None:
        state = self._gate.state
        ready = _status(state is EngineState.READY)
        for service in self._services:
            await self.servicer.set(service, ready)
        serving = self._gate.serving
        for name in self._models - serving.keys():
            # it was loaded while the server ran, and is gone
            await self.servicer.set(MODEL + name, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        self._models = set(serving)
        for name, serves in serving.items():
            await self.servicer.set(MODEL + name, _status(serves))
        # a dead worker is started again, so that only one that never loaded calls for a restart of the process
        await self.servicer.set(LIVENESS, _status(state is not EngineState.FAILED))


def _status(good: bool) -> Any:
    return health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING
