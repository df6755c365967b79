"""A real server on a real port with several models, whose workers are fakes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from omni_grpc.config import EngineConfig
from omni_grpc.config.fleet import GIB
from omni_grpc.engine import Engine
from omni_grpc.engine.inputs import InputStore
from omni_grpc.fleet import Fleet, Opening, Served
from omni_grpc.gate import Gate
from omni_grpc.server import Server
from omni_grpc.store.open import open_storage
from tests.server.fake_executor import READY, FakeExecutor
from tests.server.service import CHECKPOINT, Service

SIZE = dataclasses.replace(READY, device="cuda", device_bytes=10 * GIB)
"""What a worker says that holds 10 GiB of device memory."""


class Several(Service):
    """`workers` are those of each model by name, in the order of its replicas."""

    def __init__(self, fleet: Fleet, server: Server, workers: Mapping[str, list[FakeExecutor]]) -> None:
        self.workers = workers
        super().__init__(fleet.engines[0], server, next(iter(workers.values()))[0], fleet)

    @property
    def awake(self) -> list[str]:
        return [name for name, found in self.workers.items() if found and not found[0].asleep]

    def engine_of(self, name: str) -> Engine:
        return self.fleet.model(name).running


def fleet_of(
    names: Mapping[str, Mapping[str, Any]], ready: Any = SIZE, path: Path = CHECKPOINT.path, **settings: Any
) -> tuple[Fleet, dict[str, list[FakeExecutor]]]:
    """A fleet that has not been started. `names`: the own settings of each model; `path`: the folder of their files."""
    shared = {"port": 0, "restart_backoff": 0} | settings
    configs = {
        name: EngineConfig.from_settings(**shared, **own, model="toy", served_model_name=name)
        for name, own in names.items()
    }
    first = next(iter(configs.values()))
    storage, inputs = open_storage(first), InputStore(first.limits.input_budget)
    workers: dict[str, list[FakeExecutor]] = {name: [] for name in names}

    def make(config: EngineConfig, checkpoint: Any) -> Engine:
        made = [FakeExecutor(ready) for _ in range(config.worker.data_parallel_size)]
        workers[checkpoint.name] = made
        return Engine(config, checkpoint, made[0], storage, more=made[1:], inputs=inputs)

    models = []
    for name, config in configs.items():
        checkpoint = dataclasses.replace(CHECKPOINT, name=name, path=path)
        models.append(Served(config, checkpoint, None if config.worker.load_later else make(config, checkpoint)))
    opening = Opening(first, list(configs.values()))
    return Fleet(first, storage, inputs, models, make=make, opening=opening), workers


@contextlib.asynccontextmanager
async def serving_several(
    *names: str, ready: Any = SIZE, path: Path = CHECKPOINT.path, **settings: Any
) -> AsyncIterator[Several]:
    own = {name: settings.pop(name, {}) for name in names}
    fleet, workers = fleet_of(own, ready, path, **settings)
    server = Server(Gate(fleet), fleet.config)
    await server.start()
    service = Several(fleet, server, workers)
    try:
        yield service
    finally:
        await service.channel.close()
        await server.stop()
