"""The models of a server as one thing: who has a job, what each tenant has over all, and what is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

from omni_grpc.config import EngineConfig
from omni_grpc.engine import AdapterBook, Engine, EngineState, Job, ShareOf, TenantStats
from omni_grpc.engine.inputs import InputStore
from omni_grpc.fleet.memory import Memory
from omni_grpc.fleet.opening import Opening
from omni_grpc.fleet.served import MakeEngine, Served
from omni_grpc.store.storage import Storage
from omni_grpc.types.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OmniError,
    Violation,
)
from omni_grpc.types.events import Event
from omni_grpc.types.plan import SleepLevel

logger = logging.getLogger(__name__)

STATES = (EngineState.READY, EngineState.ASLEEP, EngineState.RESTARTING, EngineState.STARTING, EngineState.FAILED)
"""Of several models, the first of these that one is in is that of the server."""


class Fleet:
    """It belongs to one event loop. `config` has the settings of the server, `storage` what all models share."""

    def __init__(
        self,
        config: EngineConfig,
        storage: Storage,
        inputs: InputStore,
        models: Sequence[Served],
        *,
        make: MakeEngine | None = None,
        opening: Opening | None = None,
    ) -> None:
        """`make` and `opening` are for models that are loaded while it runs."""
        self.config = config
        self.storage = storage
        self.inputs = inputs
        self.jobs, self.artifacts, self.assets = storage.jobs, storage.artifacts, storage.assets
        self.forgotten = storage.forgotten
        self.on_state: list[Callable[[EngineState], None]] = []
        self.on_end: list[Callable[[Job], None]] = []
        self._on_engine: list[Callable[[Engine], None]] = []
        self._models = {model.name: model for model in models}
        self._make = make
        self._opening = opening
        self._books: dict[str, AdapterBook] = {}
        self._share_of: ShareOf | None = None
        self._looking = False
        self._ended = False
        self.memory = Memory(lambda: list(self._models.values()), config.fleet.budget_bytes, config.fleet.model_turn)
        for model in models:
            if model.engine is not None:
                self._adopt(model.engine)

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """The fleet of one model."""
        served = Served(engine.config, engine.checkpoint, engine)
        return cls(engine.config, engine.storage, engine.inputs, [served])

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def models(self) -> list[Served]:
        """All that it knows, loaded or not, in the order in which they were named."""
        return list(self._models.values())

    @property
    def engines(self) -> list[Engine]:
        return [model.engine for model in self._models.values() if model.engine is not None]

    @property
    def state(self) -> EngineState:
        """READY while one model is; that of the only one, where there is one."""
        states = {model.state for model in self._models.values()}
        if len(states) == 1 and states != {EngineState.ASLEEP}:
            return states.pop()
        if EngineState.DRAINING in states and self._ended:
            return EngineState.DRAINING
        found = next((state for state in STATES if state in states), EngineState.STOPPED)
        if found is EngineState.ASLEEP and any(model.takes_jobs for model in self._models.values()):
            # jobs wake what sleeps
            return EngineState.READY
        return found

    @property
    def ending(self) -> bool:
        """Whether it ends for good."""
        return self._ended or self.state in (EngineState.DRAINING, EngineState.STOPPED)

    @property
    def stopped(self) -> bool:
        """Whether it has ended for good."""
        return self._ended and all(engine.state is EngineState.STOPPED for engine in self.engines)

    def model(self, name: str) -> Served:
        """The model of a name; an empty one is that of the only model. Raises NotFound (MODEL_NOT_FOUND), and
        InvalidArgument (MODEL_REQUIRED) where there are several.
        """
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        if (found := self._models.get(name)) is not None:
            return found
        known = ", ".join(self._models) or "none"
        if not name:
            message = f"is required: this server has several models: {known}"
            raise InvalidArgument(
                f"model {message}", reason="MODEL_REQUIRED", violations=(Violation("model", message),)
            )
        message = f"model {name!r} is not served here; this server has {known}"
        raise NotFound(message, reason="MODEL_NOT_FOUND", metadata={"name": name})

    def adapters_of(self, name: str) -> AdapterBook:
        """The adapters that a model is to have, beside those of its settings: also while it is not loaded."""
        return self._books.setdefault(name, AdapterBook())

    def needs_asset(self, asset_id: str) -> bool:
        """Whether an upload is the file of an adapter."""
        return any(wanted.asset == asset_id for book in self._books.values() for wanted in book)

    def engine_of(self, job: Job) -> Engine | None:
        """The engine of the model that a job is for; None where it has none."""
        found = self._models.get(job.record.model)
        return None if found is None else found.engine

    @property
    def takes_over(self) -> bool:
        """Whether jobs of other servers can be gone on with here."""
        return any(engine.takes_over for engine in self.engines)

    def tenant_stats(self, tenant: str) -> TenantStats:
        """What one tenant has here, over all models."""
        return TenantStats(
            queued=sum(engine.tenant_stats(tenant).queued for engine in self.engines),
            running=sum(engine.running_of(tenant) for engine in self.engines),
            artifact_bytes=self.artifacts.artifact_bytes(tenant),
            asset_bytes=self.assets.asset_bytes(tenant),
            input_bytes=self.inputs.input_bytes(tenant),
        )

    def expected_wait(self, tenant: str) -> float:
        """Seconds until a waiting job of a tenant leaves a queue, or where none waits, until one that runs ends."""
        waits = [engine.expected_wait(tenant) for engine in self.engines]
        return min((wait for wait in waits if wait), default=0.0)

    def queue_position(self, job: Job) -> int:
        """The number of jobs of its model ahead of a job; 0 once it has left the queue."""
        engine = self.engine_of(job)
        return 0 if engine is None else engine.queue_position(job)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def cancel(self, job_id: str, reason: str) -> Job:
        """Stops a job before its next step. Raises NotFound."""
        job = self.jobs.get(job_id)
        engine = self.engine_of(job)
        return job if engine is None else engine.cancel(job_id, reason)

    def let_go(self, job: Job) -> None:
        """Stops to work on a job, without an event: it is not this server's any more."""
        if (engine := self.engine_of(job)) is not None:
            engine.let_go(job)
        else:
            self.jobs.drop(job)

    def settle(self, job: Job, event: Event) -> None:
        """Ends a job that the store has, and that nobody goes on with."""
        self.jobs.add(job, kept=True)
        job.on_end = self._tell_end
        job.append(event)
        self.storage.retention.keep(job)

    @contextlib.contextmanager
    def watching(self, job: Job) -> Iterator[None]:
        """Counts a watcher, see `Engine.watching`."""
        with contextlib.ExitStack() as stack:
            if (engine := self.engine_of(job)) is not None:
                stack.enter_context(engine.watching(job))
            yield

    def share_by(self, share_of: ShareOf) -> None:
        """From now on `share_of` says what each tenant may have, over all models."""
        self._share_of = share_of
        for engine in self.engines:
            engine.share_by(share_of)

    def observe(self, observer: Callable[[Engine], None]) -> None:
        """Calls it with each engine that there is, and with each one that comes, before that does anything."""
        self._on_engine.append(observer)
        for engine in self.engines:
            observer(engine)

    # --- models -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when the models that are loaded at the start are. Raises the error of the only one that did not load,
        or of the first, where none did.
        """
        await self.storage.open()
        self.memory.start()
        starting = [model for model in self._models.values() if model.engine is not None]
        if self.config.fleet.budget_bytes is None:
            found = await asyncio.gather(*(self._tried(model) for model in starting))
        else:
            # each needs room, which others give
            found = [await self._tried(model) for model in starting]
        errors = [one for one in found if one is not None]
        if errors and len(errors) == len(starting):
            raise errors[0]

    async def _tried(self, model: Served) -> OmniError | None:
        """Loads a model; the error that keeps it from that."""
        try:
            async with self.memory.room(model):
                await model.running.start()
        except OmniError as error:
            logger.error("model %s does not load: %s", model.name, error)
            model.failure = error.failure
            return error
        model.failure = None
        return None

    async def load(self, name: str, options: Mapping[str, object]) -> Served:
        """Begins to load a model, which need not be known yet, and returns it; one that is loaded or being loaded is
        returned as it is. Raises NotFound for a name that nothing has, InvalidArgument for options, FailedPrecondition
        (MODEL_LOADED) for others than it was loaded with.
        """
        known = self._models.get(name)
        if known is not None and known.engine is not None and known.state is not EngineState.FAILED:
            if options:
                message = f"model {known.name!r} is loaded; unload it first, or load it under another name"
                raise FailedPrecondition(message, reason="MODEL_LOADED")
            return known
        if self._make is None or self._opening is None:
            self.model(name)
            raise FailedPrecondition("this server loads no other models", reason="MODEL_NOT_LOADED")
        if known is not None and not options:
            config, checkpoint = known.config, known.checkpoint
        else:
            config, checkpoint = await asyncio.to_thread(self._opening.open, name, options)
        if known is not None and known.engine is not None:
            await self._close(known)
        engine = self._make(config, checkpoint)
        model = Served(config, checkpoint, engine, listed=known is not None and known.listed)
        if (other := self._models.get(model.name)) is not None and other is not known:
            raise AlreadyExists(f"a model {model.name!r} is here already", reason="MODEL_EXISTS")
        self._models[model.name] = model
        self._adopt(engine)
        # it goes on when the caller leaves
        model.loading = asyncio.create_task(self._tried(model), name=f"omni_grpc-load-{model.name}")
        return model

    async def unload(self, model: Served, *, force: bool) -> int:
        """Frees a model, and returns the bytes of device memory. Raises FailedPrecondition where it is not loaded, or
        has jobs, unless `force` fails them.
        """
        engine = model.running
        _refuse_busy(model, force=force, hint="cancel them, wait, or set `force`")
        freed = model.bytes if model.awake else 0
        await self._close(model)
        logger.info("model %s is unloaded", model.name)
        assert engine.state is EngineState.STOPPED
        return freed

    async def _close(self, model: Served) -> None:
        await _stop_loading([model])
        await model.running.close()
        _ = model.checkpoint  # what loading it has told stays known
        model.engine = None
        if not model.listed:
            self._models.pop(model.name, None)
        self._follow(self.state)
        self.memory.look()

    async def sleep(self, model: Served, level: SleepLevel) -> int:
        """Gives a model's device memory back until `wake`, and returns the bytes. Raises FailedPrecondition while it
        has jobs.
        """
        engine = model.running
        _refuse_busy(model, force=False, hint="cancel them, or wait")
        engine.parked = True
        try:
            freed = 0 if engine.asleep else await engine.sleep(level)
        except BaseException:
            engine.parked = False
            raise
        self._follow(self.state)
        return freed

    async def wake(self, model: Served) -> None:
        """Takes a sleeping model back into device memory. Raises what keeps it from that."""
        engine = model.running
        await self.memory.wake(model)
        engine.parked = False
        self._follow(self.state)

    async def close(self, drain: float = 0.0) -> None:
        """Refuses new jobs, gives those that are there `drain` seconds to finish, and fails the rest. Called again, it
        restarts the time.
        """
        self._ended = True
        await _stop_loading(self.models)
        await asyncio.gather(*(engine.close(drain) for engine in self.engines))
        await self.memory.stop()
        await asyncio.to_thread(self.inputs.close)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _adopt(self, engine: Engine) -> None:
        """An engine of this fleet tells what happens."""
        # that of the engine before, where there was one
        engine.adapters.book = self._books.setdefault(engine.checkpoint.name, engine.adapters.book)
        engine.on_state.append(self._follow)
        engine.on_end.append(self._tell_end)
        for observer in self._on_engine:
            observer(engine)
        engine.on_work = self._look
        engine.elsewhere_of(lambda tenant: sum(one.running_of(tenant) for one in self.engines if one is not engine))
        if self._share_of is not None:
            engine.share_by(self._share_of)

    def _follow(self, _: EngineState) -> None:
        self.memory.look()
        for observer in list(self.on_state):
            observer(self.state)

    def _tell_end(self, job: Job) -> None:
        for observer in self.on_end:
            observer(job)

    def _look(self) -> None:
        """A job came or left: one of another model may be next, of the same tenant or of the same memory."""
        if not self._looking and len(self._models) > 1:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look_now)

    def _look_now(self) -> None:
        self._looking = False
        for engine in self.engines:
            engine.look()
        self.memory.look()


async def _stop_loading(models: Sequence[Served]) -> None:
    """Ends what `load` has begun."""
    tasks = [model.loading for model in models if model.loading is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _refuse_busy(model: Served, *, force: bool, hint: str) -> None:
    if model.engine is not None and model.engine.busy and not force:
        message = f"model {model.name!r} has jobs; {hint}"
        raise FailedPrecondition(message, reason="MODEL_BUSY", metadata={"name": model.name})
