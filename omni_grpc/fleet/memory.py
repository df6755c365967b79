"""Device memory shared by the models of a server: wakes the one that jobs wait for, and puts others to sleep."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection

from omni_grpc.engine import Engine, EngineState
from omni_grpc.fleet.served import Served
from omni_grpc.fleet.turns import Evict, Tenure, Wait, make_room, next_to_wake
from omni_grpc.types.errors import Code, Failure, OmniError
from omni_grpc.types.plan import SleepLevel

logger = logging.getLogger(__name__)


class Memory:
    """At most `budget` bytes of weights on each device (None: all models fit). `turn`: seconds that a model may keep
    others out while it has jobs. One model moves at a time.
    """

    def __init__(self, models: Callable[[], Collection[Served]], budget: int | None, turn: float) -> None:
        self._models = models
        self._budget = budget
        self._turn = turn
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to wake models for their jobs."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="omni_grpc-memory")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def look(self) -> None:
        """Something has changed: a job waits, or has left."""
        self._changed.set()

    @contextlib.asynccontextmanager
    async def room(self, model: Served) -> AsyncIterator[None]:
        """Room for a model that is loaded or woken inside. Others wait until that is done."""
        async with self._lock if self._budget is not None else contextlib.nullcontext():
            await self._make_room(model)
            model.placed = True
            yield
            model.awake_since = time.monotonic()
            # only now it is known how large it is
            await self._make_room(model)
        self.look()

    async def wake(self, model: Served) -> None:
        """Wakes a model; nothing where it is awake. Raises what keeps it from that."""
        async with self.room(model):
            if model.engine is not None and model.engine.asleep:
                began = time.monotonic()
                await model.engine.wake()
                logger.info("model %s is awake after %.2f s", model.name, time.monotonic() - began)
                model.failure = None

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for model in self._models():
                model.note()
            if (name := next_to_wake(self._tenures())) is not None:
                await self._wake_for_jobs(next(one for one in self._models() if one.name == name))
                # there may be others
                self.look()

    async def _wake_for_jobs(self, model: Served) -> None:
        try:
            await self.wake(model)
        except OmniError as error:
            self._give_up(model, error.failure)
        except Exception as error:
            logger.exception("unexpected error while waking model %s", model.name)
            message = f"{type(error).__name__} while waking it"
            self._give_up(model, Failure(code=Code.INTERNAL, reason="ENGINE_ERROR", message=message))

    def _give_up(self, model: Served, failure: Failure) -> None:
        """Its jobs fail, and the next one is another try."""
        logger.error("model %s cannot be woken: %s", model.name, failure.message)
        model.failure = failure
        model.waiting_since = None
        if model.engine is not None:
            model.engine.fail_waiting(failure)

    async def _make_room(self, model: Served) -> None:
        """Puts others to sleep until there is room for this one."""
        while self._budget is not None:
            step = make_room(model.name, self._tenures(), self._budget, now=time.monotonic(), turn=self._turn)
            match step:
                case None:
                    return
                case Evict(name=name):
                    await self._put_to_sleep(next(one for one in self._models() if one.name == name))
                case Wait(seconds=seconds):
                    await self._wait(seconds)

    async def _put_to_sleep(self, model: Served) -> None:
        engine = model.engine
        assert engine is not None, "only what is awake is put to sleep"
        if engine.state not in (EngineState.READY, EngineState.RESTARTING):
            # it starts, or ends: there is no hurrying it
            await self._wait(None)
            return
        try:
            await self._sleep(model, engine)
        except OmniError as error:
            # it stays where it is for another turn
            logger.error("model %s cannot be put to sleep: %s", model.name, error)
            model.awake_since = time.monotonic()
            await self._wait(1.0)

    async def _sleep(self, model: Served, engine: Engine) -> None:
        """Keeps the weights, or where the host has no room for them, reads them again at the next turn."""
        try:
            await engine.sleep(model.sleep_level)
        except OmniError as error:
            if model.sleep_level is SleepLevel.DROP_WEIGHTS or error.reason != "HOST_MEMORY":
                raise
            logger.warning("model %s drops its weights: %s", model.name, error)
            await engine.sleep(SleepLevel.DROP_WEIGHTS)

    async def _wait(self, seconds: float | None) -> None:
        """Until something changes, or for so many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
        self._changed.clear()

    def _tenures(self) -> list[Tenure]:
        return [
            Tenure(
                name=model.name,
                bytes=model.bytes,
                devices=model.devices,
                awake=model.awake,
                idle=model.idle,
                last_used=model.engine.last_used if model.engine is not None else 0.0,
                awake_since=model.awake_since,
                waiting_since=model.waiting_since,
            )
            for model in self._models()
        ]
