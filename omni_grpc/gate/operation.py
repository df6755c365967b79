"""The server itself: what it runs, its load, and the progress of loading its model."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from omni_grpc import config as settings
from omni_grpc.config import EngineConfig
from omni_grpc.engine import EngineState, EngineStats, Job, JobState
from omni_grpc.fleet import Fleet, Served
from omni_grpc.gate.audit import Audit
from omni_grpc.gate.changes import Changes
from omni_grpc.gate.models import ModelGate
from omni_grpc.gate.refusals import refused
from omni_grpc.gate.stored import Stored
from omni_grpc.types.address import is_unix
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import NotFound, Unavailable
from omni_grpc.types.events import StepProgress
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.plan import SleepLevel
from omni_grpc.types.storage_info import StorageInfo
from omni_grpc.types.written import written

WINDOW = 10.0
"""Seconds over which steps per second are counted."""
DEFAULT_INTERVAL = 1.0
MIN_INTERVAL = 0.1
LOAD_INTERVAL = 0.2
"""Shortest time in seconds between two messages about loading. The last message is not delayed."""
PATHS = (
    "model", "lora", "presets", "recipe", "gguf_model", "token_file", "jwt_jwks", "tls_cert", "tls_key",
    "tls_client_ca", "outbound_ca", "audit_log", "model_roots", "lora_roots", "tenant_limits", "state_dir", "state_url",
    "artifact_url", "webhook_secrets", "http_key_file", "rank_secret_file", "handover", "otlp_endpoint",
    "otlp_headers_file",
)  # fmt: skip
"""Settings that name paths on the server's machine, or hold a password."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """What a server runs. `features`: its settings by name, and what the worker chose for "auto". `replica` names it
    among the servers that share its store; "" where there are none. `loading`: how far the models are that are being
    loaded, by name.
    """

    instance_id: str
    start_time: float
    device: str | None
    config: EngineConfig
    features: Mapping[str, str]
    storage: StorageInfo
    replica: str
    loading: Mapping[str, Loading] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """The load of one model. `queued` and `running` count the caller's own jobs, for an admin those of every tenant;
    `engine` is None while it is not loaded, `loading` unless it is being loaded.
    """

    model: str
    state: EngineState
    queued: int
    running: int
    engine: EngineStats | None
    loading: Loading | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadView:
    """The load at this moment, as one caller may see it: `artifact_bytes` and `steps_per_second` count the caller's own
    jobs, for an admin those of every tenant, like the numbers in `models`. `everything`: the caller is an admin.
    """

    models: Sequence[ModelLoad]
    artifact_bytes: int
    steps_per_second: float
    draining: bool
    device: str | None
    everything: bool

    @property
    def queued(self) -> int:
        return sum(model.queued for model in self.models)

    @property
    def running(self) -> int:
        return sum(model.running for model in self.models)


class OperationGate:
    """Every function raises PermissionDenied for a missing scope."""

    def __init__(self, fleet: Fleet, changes: Changes, stored: Stored, models: ModelGate, audit: Audit) -> None:
        self._fleet = fleet
        self._audit = audit
        self._changes = changes
        self._stored = stored
        self._models = models
        self._start_time = time.time()
        self._draining: set[asyncio.Future[None]] = set()

    @property
    def device(self) -> str | None:
        """The GPU that works on jobs; None for a CPU, and until a worker is ready."""
        found = [model.ready.device for model in self._fleet.models if model.ready is not None]
        return next((device for device in found if device != "cpu"), None)

    def info(self, caller: Caller) -> ServerView:
        with self._audit.refusals(caller, "GetServerInfo"):
            caller.require(*Scope)
        storage = self._fleet.storage
        return ServerView(
            instance_id=storage.instance_id,
            start_time=self._start_time,
            device=self.device,
            config=self._fleet.config,
            features=self._features(),
            storage=storage.info,
            replica=storage.instance_id if storage.info.shared else "",
            loading={
                model.name: told for model in self._models.seen(caller) if (told := model.loading_progress) is not None
            },
        )

    def may_measure(self, caller: Caller) -> None:
        """Whether a caller may see the metrics, which are those of every tenant. Raises PermissionDenied."""
        with self._audit.refusals(caller, "GetMetrics"):
            caller.require(Scope.ADMIN)

    def load(self, caller: Caller, *, action: str = "GetServerStats") -> LoadView:
        """The load. `action`: what for, in the audit log."""
        with self._audit.refusals(caller, action):
            caller.require(Scope.READ, Scope.ADMIN)
        jobs = self._stored.jobs(caller)
        states = collections.Counter((job.request.model, job.state) for job in jobs if not job.state.terminal)
        return LoadView(
            models=[
                ModelLoad(
                    model=model.name,
                    state=model.state,
                    queued=states[model.name, JobState.QUEUED],
                    running=sum(
                        count
                        for (name, state), count in states.items()
                        if name == model.name and state is not JobState.QUEUED
                    ),
                    engine=None if model.engine is None else model.engine.stats(),
                    loading=model.loading_progress,
                )
                for model in self._models.seen(caller)
            ],
            artifact_bytes=self._artifact_bytes(caller),
            steps_per_second=_recent_steps(jobs, self._fleet.storage.clock() - WINDOW) / WINDOW,
            draining=self._fleet.state in (EngineState.DRAINING, EngineState.STOPPED),
            device=self.device,
            everything=caller.admin,
        )

    def _artifact_bytes(self, caller: Caller) -> int:
        kept = self._fleet.artifacts
        return kept.size_bytes if caller.sees is None else kept.artifact_bytes(caller.sees)

    async def watch_load(self, caller: Caller, interval: float | None) -> AsyncGenerator[LoadView]:
        """The load every `interval` seconds, until the server stops."""
        interval = DEFAULT_INTERVAL if interval is None else interval
        if interval < MIN_INTERVAL:
            raise refused("interval", f"{interval:g} s is too short; nearest valid value: {MIN_INTERVAL:g} s")
        while not self._fleet.stopped:
            yield self.load(caller, action="WatchServerStats")
            await self._pause(interval, lambda: self._fleet.stopped)
        raise Unavailable("the server was stopped; watch again", reason="SERVER_STOPPED")

    async def load_model(
        self, caller: Caller, name: str, options: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[Loading]:
        """Loads a model, unless it is loaded or that has begun, and tells the progress until it is ready. Raises what
        keeps it from loading. Anybody may follow; what changes something is for an admin.
        """
        with self._audit.refusals(caller, "LoadModel", model=name):
            caller.require(*Scope)
            served = self._known(caller, name)
        if options or served is None or served.engine is None or served.state is EngineState.FAILED:
            with self._audit.action(caller, "LoadModel", model=name):
                caller.require(Scope.ADMIN)
                served = await self._fleet.load(served.name if served is not None else name, options or {})
        async for told in self._progress(served):
            yield told

    def _known(self, caller: Caller, name: str) -> Served | None:
        """None for a model that an admin may load."""
        try:
            return self._models.named(caller, name)
        except NotFound:
            if not caller.admin:
                raise
            return None

    async def _progress(self, model: Served) -> AsyncGenerator[Loading]:
        heartbeat = self._fleet.config.server.heartbeat_interval

        def over() -> bool:
            return model.state not in (EngineState.STARTING, EngineState.RESTARTING)

        while not over():
            assert model.engine is not None, "what starts has an engine"
            told, until = model.engine.loading, time.monotonic() + heartbeat
            yield told
            await self._pause(LOAD_INTERVAL, over)
            while not over() and model.engine.loading is told and time.monotonic() < until:
                await self._pause(LOAD_INTERVAL, over)
        failure = model.failure if model.engine is None else model.engine.start_failure
        if failure is not None:
            raise failure.error()
        if model.state not in (EngineState.READY, EngineState.ASLEEP):
            if not self._fleet.ending:
                raise model.not_loaded()
            raise Unavailable(f"the server is stopping: it is {model.state}", reason="SERVER_STOPPED")

    async def unload_model(self, caller: Caller, name: str, *, force: bool) -> int:
        """Frees a model, and returns the bytes of device memory that it gives back."""
        with self._audit.action(caller, "UnloadModel", model=name):
            return await self._fleet.unload(self._for_admin(caller, name), force=force)

    async def sleep(self, caller: Caller, name: str, level: SleepLevel) -> int:
        """Gives a model's device memory back until it is woken, and returns the bytes."""
        with self._audit.action(caller, "Sleep", model=name):
            return await self._fleet.sleep(self._for_admin(caller, name), level)

    async def wake(self, caller: Caller, name: str) -> float:
        """Takes a sleeping model back into device memory. Returns the seconds that it took."""
        with self._audit.action(caller, "Wake", model=name):
            model, began = self._for_admin(caller, name), time.monotonic()
            await self._fleet.wake(model)
            return time.monotonic() - began

    async def drain(self, caller: Caller, seconds: float | None) -> tuple[int, int]:
        """The server takes no new jobs, and lets those that are there end. Returns at once, with the numbers of jobs
        that run and wait.
        """
        with self._audit.action(caller, "Drain"):
            caller.require(Scope.ADMIN)
            stats = [engine.stats() for engine in self._fleet.engines]
            draining = asyncio.ensure_future(self._fleet.close(self._drain_seconds(seconds)))
            # it holds itself until it is done
            self._draining.add(draining)
            draining.add_done_callback(self._draining.discard)
            return sum(one.running for one in stats), sum(one.queued for one in stats)

    async def renew(self, caller: Caller, name: str, replica: int, seconds: float | None) -> tuple[int, int]:
        """One replica of a model ends what it has, and is started anew; the queue goes to the others meanwhile. Returns
        at once, with the numbers of its jobs and of those that wait for the model.
        """
        with self._audit.action(caller, "Drain", model=name):
            engine = self._for_admin(caller, name).running
            return engine.renew(replica, self._drain_seconds(seconds)), engine.stats().queued

    def _drain_seconds(self, seconds: float | None) -> float:
        return self._fleet.config.server.drain_timeout if seconds is None else seconds

    def _for_admin(self, caller: Caller, name: str) -> Served:
        caller.require(Scope.ADMIN)
        return self._models.named(caller, name)

    async def _pause(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Sleeps for `seconds`, or until a change of the engine's state makes `enough` true."""
        until = time.monotonic() + seconds
        while not enough() and (left := until - time.monotonic()) > 0:
            await self._changes.wait(self._changes.count, left)

    def _features(self) -> dict[str, str]:
        """Every setting of the server except paths on its machine, as it is written in YAML, and what the worker chose
        for "auto".
        """
        features = _written(self._fleet.config)
        for model in self._fleet.models:
            of = "" if len(self._fleet.models) == 1 else f"{model.name}."
            features |= {of + name: value for name, value in self._own_features(model, features if of else {}).items()}
        return features

    def _own_features(self, model: Served, common: Mapping[str, str]) -> dict[str, str]:
        """What a model has for itself: settings that differ from those of the server, and what its worker chose."""
        own = _written(model.config) if common else {}
        own = {name: value for name, value in own.items() if common.get(name) != value}
        if (ready := model.ready) is not None:
            own |= {"device": ready.device, "dtype": ready.dtype}
        return own


def _written(config: EngineConfig) -> dict[str, str]:
    """Every setting except paths on the server's machine, as it is written in YAML."""
    values = {option.name: option.of(config) for option in settings.options() if option.name not in PATHS}
    return {
        name: written(value)
        for name, value in values.items()
        if value is not None and not (isinstance(value, str) and is_unix(value))
    }


def _recent_steps(jobs: list[Job], since: float) -> int:
    count = 0
    for job in jobs:
        for entry in reversed(job.entries):
            if entry.time < since:
                break
            count += isinstance(entry.event, StepProgress)
    return count
