"""The server itself: what it runs, its load, and the progress of loading its model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping

from omni_grpc import config as settings
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, EngineState, EngineStats, Job, JobState
from omni_grpc.gate.audit import Audit
from omni_grpc.gate.changes import Changes
from omni_grpc.gate.models import ModelGate
from omni_grpc.gate.refusals import refused
from omni_grpc.gate.stored import Stored
from omni_grpc.types.address import is_unix
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import Unavailable
from omni_grpc.types.events import StepProgress
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.storage_info import StorageInfo
from omni_grpc.types.written import written

WINDOW = 10.0
"""Seconds over which steps per second are counted."""
DEFAULT_INTERVAL = 1.0
MIN_INTERVAL = 0.1
LOAD_INTERVAL = 0.2
"""Shortest time in seconds between two messages about loading. The last message is not delayed."""
PATHS = (
    "model", "lora", "gguf_model", "token_file", "jwt_jwks", "tls_cert", "tls_key", "tls_client_ca", "outbound_ca",
    "audit_log", "tenant_limits", "state_dir", "state_url", "artifact_url", "webhook_secrets",
)  # fmt: skip
"""Settings that name paths on the server's machine, or hold a password."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """What a server runs. `features`: its settings by name, and what the worker chose for "auto". `replica` names it
    among the servers that share its store; "" where there are none.
    """

    instance_id: str
    start_time: float
    device: str | None
    config: EngineConfig
    features: Mapping[str, str]
    storage: StorageInfo
    replica: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadView:
    """The load at this moment, as one caller may see it: `queued`, `running`, `artifact_bytes` and `steps_per_second`
    count the caller's own jobs, for an admin those of every tenant.
    """

    queued: int
    running: int
    artifact_bytes: int
    steps_per_second: float
    draining: bool
    device: str | None
    model: str
    engine: EngineStats


class OperationGate:
    """Every function raises PermissionDenied for a missing scope."""

    def __init__(self, engine: Engine, changes: Changes, stored: Stored, models: ModelGate, audit: Audit) -> None:
        self._engine = engine
        self._audit = audit
        self._changes = changes
        self._stored = stored
        self._models = models
        self._start_time = time.time()

    @property
    def device(self) -> str | None:
        """The GPU that works on jobs; None for a CPU, and until the worker is ready."""
        ready = self._engine.ready
        return None if ready is None or ready.device == "cpu" else ready.device

    def info(self, caller: Caller) -> ServerView:
        with self._audit.refusals(caller, "GetServerInfo"):
            caller.require(*Scope)
        storage = self._engine.storage
        return ServerView(
            instance_id=storage.instance_id,
            start_time=self._start_time,
            device=self.device,
            config=self._engine.config,
            features=self._features(),
            storage=storage.info,
            replica=storage.instance_id if storage.info.shared else "",
        )

    def load(self, caller: Caller, *, action: str = "GetServerStats") -> LoadView:
        """The load. `action`: what for, in the audit log."""
        with self._audit.refusals(caller, action):
            caller.require(Scope.READ, Scope.ADMIN)
        stats, jobs = self._engine.stats(), self._stored.jobs(caller)
        queued = sum(job.state is JobState.QUEUED for job in jobs)
        return LoadView(
            queued=queued,
            running=sum(not job.state.terminal for job in jobs) - queued,
            artifact_bytes=self._artifact_bytes(caller),
            steps_per_second=_recent_steps(jobs, time.time() - WINDOW) / WINDOW,
            draining=self._engine.state in (EngineState.DRAINING, EngineState.STOPPED),
            device=self.device,
            model=self._engine.checkpoint.name,
            engine=stats,
        )

    def _artifact_bytes(self, caller: Caller) -> int:
        kept = self._engine.artifacts
        return kept.size_bytes if caller.sees is None else kept.artifact_bytes(caller.sees)

    async def watch_load(self, caller: Caller, interval: float | None) -> AsyncGenerator[LoadView]:
        """The load every `interval` seconds, until the server stops."""
        interval = DEFAULT_INTERVAL if interval is None else interval
        if interval < MIN_INTERVAL:
            raise refused("interval", f"{interval:g} s is too short; nearest valid value: {MIN_INTERVAL:g} s")
        while self._engine.state is not EngineState.STOPPED:
            yield self.load(caller, action="WatchServerStats")
            await self._pause(interval, lambda: self._engine.state is EngineState.STOPPED)
        raise Unavailable("the server was stopped; watch again", reason="SERVER_STOPPED")

    async def load_model(self, caller: Caller, model: str) -> AsyncGenerator[Loading]:
        """The progress of loading, until the model is ready. Raises what keeps it from loading."""
        with self._audit.refusals(caller, "LoadModel", model=model):
            caller.require(*Scope)
            self._models.check_name(caller, model)
        engine, heartbeat = self._engine, self._engine.config.server.heartbeat_interval

        def over() -> bool:
            return engine.state not in (EngineState.STARTING, EngineState.RESTARTING)

        while not over():
            told, until = engine.loading, time.monotonic() + heartbeat
            yield told
            await self._pause(LOAD_INTERVAL, over)
            while not over() and engine.loading is told and time.monotonic() < until:
                await self._pause(LOAD_INTERVAL, over)
        if engine.start_failure is not None:
            raise engine.start_failure.error()
        if engine.state is not EngineState.READY:
            raise Unavailable(f"the server is stopping: it is {engine.state}", reason="SERVER_STOPPED")

    async def _pause(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Sleeps for `seconds`, or until a change of the engine's state makes `enough` true."""
        until = time.monotonic() + seconds
        while not enough() and (left := until - time.monotonic()) > 0:
            await self._changes.wait(self._changes.count, left)

    def _features(self) -> dict[str, str]:
        """Every setting of the server except paths on its machine, as it is written in YAML, and what the worker chose
        for "auto".
        """
        values = {
            option.name: option.of(self._engine.config) for option in settings.options() if option.name not in PATHS
        }
        features = {
            name: written(value)
            for name, value in values.items()
            if value is not None and not (isinstance(value, str) and is_unix(value))
        }
        if (ready := self._engine.ready) is not None:
            features |= {"device": ready.device, "dtype": ready.dtype}
        return features


def _recent_steps(jobs: list[Job], since: float) -> int:
    count = 0
    for job in jobs:
        for entry in reversed(job.entries):
            if entry.time < since:
                break
            count += isinstance(entry.event, StepProgress)
    return count
