"""A worker on a node of a Ray cluster, reached through a driver process of its own (`ray_driver`)."""

from __future__ import annotations

import asyncio
import importlib.util
import logging

from omni_grpc.config import EngineConfig
from omni_grpc.engine.executor import Deliver, Executor, Obituary, ProcessExecutor, gone
from omni_grpc.engine.ray_local import LocalRay
from omni_grpc.types.errors import ConfigError, OmniError, Violation
from omni_grpc.types.plan import Died, Order, Plan
from omni_grpc.types.spec import Checkpoint

logger = logging.getLogger(__name__)

DRIVER = "omni_grpc.engine.ray_driver:serve"
OBITUARY = Obituary(
    "the Ray worker behind process",
    "Ray ends that process when the head of its cluster or the Ray node of this machine is lost; see its log",
)


class RayExecutor:
    """A worker in a Ray actor. `local`: the Ray of this machine; None: the cluster that the settings name."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, local: LocalRay | None, *, driver: str = DRIVER
    ) -> None:
        self._arguments = (config, checkpoint)
        self._driver = driver
        self._local = local
        self._inner: ProcessExecutor | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the driver on this machine; None while there is none."""
        return self._inner.pid if self._inner is not None else None

    def start(self, deliver: Deliver) -> None:
        self._inner = None
        if self._closed and self._local is not None:
            self._local.hold()
        self._closed = False
        self._starting = asyncio.get_running_loop().create_task(self._start(deliver))

    async def _start(self, deliver: Deliver) -> None:
        try:
            environment = {} if self._local is None else await asyncio.to_thread(self._local.environment)
        except OmniError as error:
            if not self._closed:
                deliver(Died(failure=error.failure))
            return
        if self._closed:
            return
        self._inner = ProcessExecutor(*self._arguments, worker=self._driver, environment=environment, obituary=OBITUARY)
        self._inner.start(deliver)

    def submit(self, plan: Plan) -> None:
        if self._inner is None:
            raise gone()
        self._inner.submit(plan)

    def order(self, order: Order) -> None:
        if self._inner is None:
            raise gone()
        self._inner.order(order)

    def kill(self) -> None:
        if self._inner is not None:
            self._inner.kill()

    async def close(self) -> None:
        self._closed = True
        if self._starting is not None:
            await self._starting
        if self._inner is not None:
            await self._inner.close()
        if self._local is not None:
            await asyncio.to_thread(self._local.release)


def ray_executors(config: EngineConfig, checkpoint: Checkpoint, *, driver: str = DRIVER) -> list[Executor]:
    """One for each replica. Raises ConfigError where the extra is not installed."""
    if importlib.util.find_spec("ray") is None:
        rule = "is 'ray', but ray is not installed; pip install 'omni-grpc[ray]'"
        message = f"--distributed-executor-backend {rule}"
        violation = Violation("distributed_executor_backend", rule)
        raise ConfigError(message, reason="EXTRA_NOT_INSTALLED", violations=(violation,))
    replicas = config.worker.data_parallel_size
    local = LocalRay(config, checkpoint, replicas) if config.worker.ray_address is None else None
    return [RayExecutor(config, checkpoint, local, driver=driver) for _ in range(replicas)]
