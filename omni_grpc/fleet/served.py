"""A model of a server: its settings, and its engine while it is loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from omni_grpc.checkpoint import sizes
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, EngineState
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.resolve.settings import facts_of
from omni_grpc.types.errors import CheckpointError, FailedPrecondition, Failure, OmniError
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.plan import Ready, SleepLevel
from omni_grpc.types.spec import Checkpoint

_WITHOUT_WORKER = (EngineState.STOPPED, EngineState.FAILED)
_TAKES_JOBS = (EngineState.READY, EngineState.ASLEEP)

MakeEngine = Callable[[EngineConfig, Checkpoint], Engine]


class Served:
    """`engine` is None while it is not loaded; `failure` is what kept it from loading or waking the last time.
    `listed`: it is one of those that the server was started with, and is still known when it is unloaded.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, engine: Engine | None = None, *, listed: bool = True
    ) -> None:
        self.config = config
        self._checkpoint = checkpoint
        self.engine = engine
        self.listed = listed
        self.failure: Failure | None = None
        self.loading: asyncio.Task[OmniError | None] | None = None
        """What loads it, if it was asked for while the server runs."""
        self._files: int | None = None
        self.placed = False
        """Whether its worker has been given room, and loads or has loaded."""
        self.awake_since = 0.0
        self.waiting_since: float | None = None
        """Since when a job waits for it to be woken, by `time.monotonic`."""

    @property
    def name(self) -> str:
        return self._checkpoint.name

    @property
    def checkpoint(self) -> Checkpoint:
        """With what loading it has told."""
        if self.engine is not None:
            self._checkpoint = self.engine.checkpoint
        return self._checkpoint

    @property
    def state(self) -> EngineState:
        return EngineState.STOPPED if self.engine is None else self.engine.state

    @property
    def ready(self) -> Ready | None:
        return None if self.engine is None else self.engine.ready

    @property
    def loading_progress(self) -> Loading | None:
        """How far it is while it is being loaded; None otherwise."""
        starts = self.state in (EngineState.STARTING, EngineState.RESTARTING)
        return self.engine.loading if self.engine is not None and starts else None

    @property
    def facts(self) -> ServingFacts:
        """The facts by which requests are checked."""
        return facts_of(self.config, self.checkpoint, None) if self.engine is None else self.engine.facts

    @property
    def running(self) -> Engine:
        """Its engine. Raises FailedPrecondition (MODEL_NOT_LOADED) where it has none."""
        if self.engine is None:
            raise self.not_loaded()
        return self.engine

    def not_loaded(self) -> FailedPrecondition:
        """What is said of it while it is not loaded."""
        message = f"model {self.name!r} is not loaded; AdminService.LoadModel loads it"
        return FailedPrecondition(message, reason="MODEL_NOT_LOADED", metadata={"name": self.name})

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that its replicas run on, as far as they can be told apart."""
        worker = self.config.worker
        return worker.devices or tuple(str(number) for number in range(worker.data_parallel_size))

    @property
    def bytes(self) -> int:
        """Of the weights of one replica, what is in device memory while it is awake: as measured or, before it was
        loaded for the first time, as its files are large. 0 where that is not known.
        """
        if self.engine is not None and (measured := self.engine.device_bytes):
            return measured
        if self._files is None:
            self._files = _bytes_of_files(self.checkpoint)
        return self._files

    @property
    def awake(self) -> bool:
        """Whether it has device memory, or is about to."""
        return self.engine is not None and self.placed and not self.engine.asleep and self.state not in _WITHOUT_WORKER

    @property
    def idle(self) -> bool:
        """Whether it could sleep without a job noticing."""
        return self.engine is not None and not self.engine.busy and self.state is EngineState.READY

    @property
    def takes_jobs(self) -> bool:
        """Whether a job that is made now is done, if it has to wait for its turn."""
        return self.engine is not None and self.state in _TAKES_JOBS and not self.engine.parked

    @property
    def wanted(self) -> bool:
        """Whether it sleeps while a job waits for it."""
        return self.engine is not None and self.engine.asleep and self.engine.waits and not self.engine.parked

    @property
    def sleep_level(self) -> SleepLevel:
        """How it sleeps when others need its memory. On a CPU its weights are in the memory of the host anyway."""
        on_host = self.ready is not None and self.ready.device == "cpu"
        keeps = self.config.fleet.sleeping_weights == "host" and not on_host
        return SleepLevel.KEEP_WEIGHTS if keeps else SleepLevel.DROP_WEIGHTS

    def note(self) -> None:
        """Takes down since when a job waits for it."""
        if not self.wanted:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = time.monotonic()


def _bytes_of_files(checkpoint: Checkpoint) -> int:
    try:
        return sum(part.stored_bytes for part in sizes.parts(checkpoint, sizes.headers(checkpoint.path)))
    except (CheckpointError, OSError):
        # one of the hub that is not here yet
        return 0
