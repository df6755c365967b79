"""Adapters that come and go while an engine runs: which worker has which of them, and who waits for that."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence

from omni_grpc.engine.adapter_book import LOST_TWICE, AdapterBook, AdapterState, Wanted
from omni_grpc.engine.replica import Replica
from omni_grpc.engine.timers import Timers
from omni_grpc.types.errors import Code, FailedPrecondition, Failure, Unavailable
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.lora import Adapter, Lora
from omni_grpc.types.plan import AdapterFailed, AdapterLoaded, LoadAdapter, OfAdapter, Ready, UnloadAdapter

logger = logging.getLogger(__name__)

TIMER = "adapters"
"""Name of the timer of a worker that loads adapters before it takes jobs."""


@dataclasses.dataclass(slots=True)
class Seat:
    """The adapters of one worker, by uid. `ready`: what it has said of itself, as long as it loads those without which
    it takes no jobs.
    """

    has: set[str] = dataclasses.field(default_factory=set)
    loading: set[str] = dataclasses.field(default_factory=set)
    unloading: set[str] = dataclasses.field(default_factory=set)
    ready: Ready | None = None


class Adapters:
    """Those of one engine. Every worker that takes jobs has all of `book`: one that was started anew loads them before
    its Ready counts, one that slept before it takes jobs again.

    `begin` is called with a worker that has loaded what it needed, and what it has said of itself; `on_lost` with an
    adapter that was there and cannot be used any more.
    """

    def __init__(self, replicas: Sequence[Replica], limit: float) -> None:
        """`limit`: seconds that loading may take."""
        self._replicas = replicas
        self._limit = limit
        self._seats = {replica.number: Seat() for replica in replicas}
        self._waiters: list[asyncio.Future[None]] = []
        self.book = AdapterBook()
        self.begin: Callable[[Replica, Ready], None] = lambda replica, ready: None
        self.on_lost: Callable[[Wanted], None] = lambda wanted: None

    # --- questions ----------------------------------------------------------------------------------------------------

    def state(self, wanted: Wanted) -> AdapterState:
        if wanted.failure is not None or wanted.leaving:
            return wanted.idle_state
        if wanted.fresh or any(wanted.uid in seat.loading for seat in self._seats.values()):
            return AdapterState.LOADING
        held = any(wanted.uid in self._seats[replica.number].has for replica in self._replicas if replica.open)
        return AdapterState.LOADED if held else AdapterState.PENDING

    def loaded(self, found: WorkerFindings) -> list[Adapter]:
        """Those that workers have, of the settings and others."""
        own = self.book.of_settings(found)
        return own + [wanted.record for wanted in self.book if self.state(wanted) is AdapterState.LOADED]

    def missing(self, loras: Iterable[Lora], ready: Ready | None) -> str:
        """The first adapter of a request that no worker will have, "" if there is none or it is not known yet."""
        if ready is None:
            return ""
        keys = self.book.keys(ready.found)
        return next((lora.lora_id for lora in loras if lora.key not in keys), "")

    # --- loading and unloading ----------------------------------------------------------------------------------------

    async def load(self, wanted: Wanted) -> Adapter | None:
        """Has every worker load an adapter. Returns what they found, or None where none works at the moment: those that
        come load it then. Raises what keeps one of them from it, and none has it.
        """
        wanted.fresh = True
        if self.book.of_uid(wanted.uid) is None:
            self.book.add(wanted)
        asked = [replica for replica in self._replicas if replica.open]
        try:
            for replica in asked:
                self._sync(replica)
            async with asyncio.timeout(self._limit):
                while wanted.failure is None and any(wanted.uid in self._seats[one.number].loading for one in asked):
                    await self.change()
        except TimeoutError:
            message = f"loading adapter {wanted.id!r} took more than {self._limit:g} s (--phase-timeout)"
            wanted.failure = Failure(code=Code.DEADLINE_EXCEEDED, reason="LORA_LOAD_TIMEOUT", message=message)
        except BaseException:
            self.give_up(wanted)
            raise
        if wanted.failure is None and asked and wanted.adapter is None:
            message = f"the worker died while it loaded adapter {wanted.id!r}; see its log before you load it again"
            wanted.failure = Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message=message)
        if (failure := wanted.failure) is not None:
            self.give_up(wanted)
            raise failure.error()
        wanted.fresh = False
        return wanted.adapter

    def give_up(self, wanted: Wanted) -> None:
        """Whoever has it unloads it; nobody waits for that."""
        self.book.remove(wanted.uid)
        self.sync()

    def leave(self, uid: str, leaving: bool) -> None:
        """From now on no new request can name an adapter, or it can again."""
        self.book.leave(uid, 1 if leaving else -1)

    async def drop(self, uid: str) -> None:
        """Has every worker unload an adapter, and returns when all that work have."""
        self.book.remove(uid)
        self.sync()
        while any(uid in seat.unloading for seat in self._seats.values()):
            await self.change()

    async def caught_up(self, replicas: Iterable[Replica]) -> None:
        """Returns when these have loaded all that they lack, or could not."""
        ours = [replica for replica in replicas if replica.open]
        for replica in ours:
            self._sync(replica)
        try:
            async with asyncio.timeout(self._limit):
                while any(self._seats[replica.number].loading for replica in ours):
                    await self.change()
        except TimeoutError:
            for replica in ours:
                self._too_late(replica)

    def sync(self) -> None:
        """Tells every worker what it lacks, and what it need not have any more."""
        for replica in self._replicas:
            if replica.open:
                self._sync(replica)

    # --- what workers say ---------------------------------------------------------------------------------------------

    def awaits(self, replica: Replica, ready: Ready, timers: Timers) -> bool:
        """Whether a worker that says it is ready loads adapters first; `begin` follows."""
        seat = self._seats[replica.number] = Seat(has={adapter.key for adapter in ready.found.loras})
        seat.ready = ready
        self._sync(replica)
        if not seat.loading:
            seat.ready = None
            return False
        logger.info("worker %d loads %d adapters before it takes jobs", replica.number, len(seat.loading))
        timers.set(replica.owner, TIMER, self._limit, lambda *_: self._too_late(replica))
        return True

    def on_report(self, replica: Replica, report: OfAdapter) -> None:
        """A worker has carried out an order, or has lost an adapter."""
        seat = self._seats[replica.number]
        match report:
            case AdapterLoaded(adapter=adapter):
                seat.loading.discard(adapter.key)
                seat.has.add(adapter.key)
                if (wanted := self.book.of_uid(adapter.key)) is not None:
                    wanted.adapter = wanted.adapter or adapter
            case AdapterFailed(uid=uid, failure=failure):
                seat.loading.discard(uid)
                seat.has.discard(uid)
                if (wanted := self.book.of_uid(uid)) is not None:
                    self._lose(wanted, failure)
            case _:
                seat.has.discard(report.uid)
                seat.unloading.discard(report.uid)
        if replica.open or seat.ready is not None:
            # what was ordered meanwhile the other way round
            self._sync(replica)
        self._settle(replica)

    def lost(self, replica: Replica) -> None:
        """A worker is gone, and with it what it had."""
        seat, self._seats[replica.number] = self._seats[replica.number], Seat()
        for uid in seat.loading:
            wanted = self.book.of_uid(uid)
            if wanted is not None and not wanted.fresh:
                wanted.deaths += 1
                if wanted.deaths >= LOST_TWICE:
                    message = f"{wanted.deaths} workers died while they loaded it"
                    self._lose(wanted, Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message=message))
        self.notify()

    # --- parts --------------------------------------------------------------------------------------------------------

    def _sync(self, replica: Replica) -> None:
        seat = self._seats[replica.number]
        ready = seat.ready or replica.ready
        keys = self.book.keys(None if ready is None else ready.found)
        for order in self.book.orders():
            if order.uid not in seat.has | seat.loading | seat.unloading:
                self._tell(replica, order, seat.loading)
        for uid in seat.has - keys - seat.unloading:
            self._tell(replica, UnloadAdapter(uid=uid), seat.unloading)

    def _tell(self, replica: Replica, order: LoadAdapter | UnloadAdapter, asked: set[str]) -> None:
        # before: an executor may answer at once
        asked.add(order.uid)
        try:
            replica.executor.order(order)
        except Unavailable as error:
            # its end is on its way, and the next one is told all of it
            asked.discard(order.uid)
            logger.info("a worker that was to load or unload an adapter is gone: %s", error)

    def _lose(self, wanted: Wanted, failure: Failure) -> None:
        wanted.failure = wanted.failure or failure
        if not wanted.fresh:
            logger.error("adapter %s cannot be used any more: %s", wanted.id, failure.message)
            self.on_lost(wanted)
            self.sync()

    def _too_late(self, replica: Replica) -> None:
        seat = self._seats[replica.number]
        message = f"loading took more than {self._limit:g} s (--phase-timeout)"
        for uid in sorted(seat.loading):
            if (wanted := self.book.of_uid(uid)) is not None:
                failure = Failure(code=Code.DEADLINE_EXCEEDED, reason="LORA_LOAD_TIMEOUT", message=message)
                self._lose(wanted, failure)
        # it may still come: then it is unloaded
        seat.loading.clear()
        self._settle(replica)

    def _settle(self, replica: Replica) -> None:
        seat = self._seats[replica.number]
        if seat.ready is not None and not seat.loading:
            ready, seat.ready = seat.ready, None
            self.begin(replica, ready)
        self.notify()

    async def change(self) -> None:
        """Returns when something has changed: an adapter at a worker, or that a job has ended."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def notify(self) -> None:
        """Something has changed."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def in_use(lora_id: str, jobs: int) -> FailedPrecondition:
    """The refusal to unload what jobs use."""
    message = f"adapter {lora_id!r} is used by {jobs} jobs; give `wait` to let them end, or set `force` to fail them"
    return FailedPrecondition(message, reason="LORA_IN_USE", metadata={"name": lora_id, "jobs": str(jobs)})


def unloaded(lora_id: str, known: Wanted | None = None) -> Failure:
    """What a job fails with whose adapter is gone; `known`: what there is of its id now."""
    if known is not None and known.failure is not None:
        message = f"adapter {lora_id!r} could not be loaded again: {known.failure.message}"
        return Failure(code=Code.FAILED_PRECONDITION, reason="LORA_NOT_LOADED", message=message)
    message = f"adapter {lora_id!r} was unloaded before this job ended; load it and send the request again"
    return Failure(code=Code.FAILED_PRECONDITION, reason="LORA_UNLOADED", message=message)
