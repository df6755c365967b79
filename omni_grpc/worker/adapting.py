"""Adapters that are loaded and unloaded by order while a worker runs, beside its lanes."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from omni_grpc.features import Adapters
from omni_grpc.types.errors import FailedPrecondition, Failure, OperationCancelled, ResourceExhausted
from omni_grpc.types.lora import Adapter
from omni_grpc.types.plan import AdapterFailed, AdapterLoaded, AdapterUnloaded, LoadAdapter, Ready, Report
from omni_grpc.types.request import Request
from omni_grpc.types.vitals import AdapterMemory
from omni_grpc.worker.failure import failure

logger = logging.getLogger(__name__)

T = TypeVar("T")

NONE = (
    "the model was started without LoRA adapters, and takes none while it runs; give the server one of the settings "
    "that are about them, --lora NAME=PATH or --lora-device-cache for example"
)


class Adapting:
    """Carries out the orders about adapters of a worker: one load after the other, and what is freed beside them.
    `between_steps` enters the lane of the steps; `rank` is the worker's among those of its model.

    It remembers what was ordered, for a model that is dropped while the worker sleeps and loaded anew.
    """

    def __init__(
        self, rank: int, send: Callable[[Report], None], between_steps: Callable[[Callable[[], None]], None]
    ) -> None:
        self._rank, self._send, self._between_steps = rank, send, between_steps
        self._adapters: Adapters | None = None
        self._dropped = False
        self._lock = threading.Lock()
        self._orders: dict[str, LoadAdapter] = {}
        """Those that are loaded or to be loaded."""
        self._pending: dict[str, float] = {}
        """Those that were not answered yet, and when they came."""
        self._unloaded: set[str] = set()
        """Adapters of the settings that were unloaded."""
        self._expecting, self._expected = threading.Condition(), set[str]()
        """Requests that have ended, and are released once the step has ended that they may be in."""
        self._loading, self._freeing = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"omni_grpc-{name}") for name in ("load", "free")
        )

    def close(self) -> None:
        """What is being read goes on to its end, and is not told."""
        for lane in (self._loading, self._freeing):
            lane.shutdown(wait=False, cancel_futures=True)

    @property
    def memory(self) -> tuple[AdapterMemory, ...]:
        """What adapters have of each memory, from any thread; nothing before the model is there."""
        adapters = self._adapters
        return () if adapters is None else tuple(adapters.memory)

    # --- orders -------------------------------------------------------------------------------------------------------

    def load(self, order: LoadAdapter) -> None:
        """On any thread."""
        with self._lock:
            self._orders[order.uid] = order
            self._pending[order.uid] = time.monotonic()
        self._loading.submit(self._load, order)

    def unload(self, uid: str) -> None:
        """Called where requests are prepared: those that the worker was given before have the adapter still."""
        with self._lock:
            if self._orders.pop(uid, None) is None:
                self._unloaded.add(uid)
            if uid in self._pending and not self._dropped:
                # its load finds that nobody wants it
                return
            self._pending.pop(uid, None)
            adapters = self._adapters
            try:
                entry = None if adapters is None else adapters.unload(uid)
                known = adapters is not None
            except KeyError:
                known = False
        if adapters is None or not known:
            self._tell(AdapterUnloaded(uid=uid, rank=self._rank))
        elif entry is not None:
            self._free(adapters, uid, entry)

    # --- requests -----------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Called before a request is prepared, see Adapters.admit."""
        adapters = self._adapters
        if adapters is None:
            if request.loras:
                raise FailedPrecondition(NONE, reason="LORA_NOT_LOADED")
            return
        self._with_room(lambda: adapters.admit(request))

    def expect(self, ids: Sequence[str]) -> None:
        """`release_expected` of these requests follows, once the step that runs has ended."""
        with self._expecting:
            self._expected.update(ids)

    def release_expected(self, ids: Sequence[str]) -> None:
        """As `release`, for those that wait for it."""
        self.release(ids)
        with self._expecting:
            self._expected.difference_update(ids)
            self._expecting.notify_all()

    def release(self, ids: Iterable[str]) -> None:
        """Requests have ended, and nothing works on them any more."""
        adapters = self._adapters
        if adapters is None:
            return
        for request_id in ids:
            for entry in adapters.release(request_id):
                self._free(adapters, entry.key, entry)

    # --- the model comes and goes -------------------------------------------------------------------------------------

    def begin(self, adapters: Adapters | None, ready: Ready) -> Ready:
        """The model was loaded, for the first time or anew, and nothing runs: what had been loaded by order comes back.
        Returns what is to be told of the model.
        """
        with self._lock:
            self._adapters, self._dropped = adapters, False
            orders, unloaded = list(self._orders.values()), tuple(self._unloaded)
        if adapters is None:
            return ready
        for uid in unloaded:
            try:
                adapters.remove(adapters.unload(uid))
            except KeyError:
                logger.debug("adapter %s is none of the settings", uid)
        for order in orders:
            self._carry_out(adapters, order)
        return dataclasses.replace(ready, found=dataclasses.replace(ready.found, loras=tuple(adapters.found)))

    def wake(self) -> None:
        """The model is on its device again."""
        if self._adapters is not None:
            self._adapters.wake()

    def drop(self) -> None:
        """The model is about to be dropped."""
        with self._lock:
            self._adapters, self._dropped = None, True

    # --- parts --------------------------------------------------------------------------------------------------------

    def _load(self, order: LoadAdapter) -> None:
        """On the thread of loads. What was read for a model that is gone by then is loaded again with the next one."""
        with self._lock:
            adapters, answered = self._adapters, order.uid not in self._pending
            wanted = order.uid in self._orders
        if self._dropped or answered:
            return
        try:
            if not wanted:
                raise OperationCancelled(f"the adapter {order.id!r} was unloaded before it was there")
            if adapters is None:
                raise FailedPrecondition(NONE, reason="LORA_OFF")
            entry = self._with_room(lambda: adapters.load(order))
            self._between_steps(lambda: self._attach(adapters, order, entry))
        except Exception as error:  # noqa: BLE001 - an order that fails is answered, as a request is
            self._fail(order, failure(error, f"loading the adapter {order.id}"))

    def _with_room(self, work: Callable[[], T]) -> T:
        """Does what finds no room once more, where it is about to be: requests that were dropped may be in the step
        that runs.
        """
        while True:
            with self._expecting:
                expected = bool(self._expected)
            try:
                return work()
            except ResourceExhausted:
                if not expected:
                    raise
            with self._expecting:
                self._expecting.wait_for(lambda: not self._expected)

    def _attach(self, adapters: Adapters, order: LoadAdapter, entry: Any) -> None:
        with self._lock:
            if adapters is not self._adapters:
                return
            came, wanted = self._pending.pop(order.uid, None), order.uid in self._orders
            adapter: Adapter | None = adapters.attach(entry) if wanted else None
        if adapter is None:
            self._freeing.submit(adapters.remove, entry)
            self._say_failed(order.uid, _unwanted(order), wanted=False)
        elif came is not None:
            self._tell(AdapterLoaded(adapter=adapter, elapsed=time.monotonic() - came, rank=self._rank))

    def _carry_out(self, adapters: Adapters, order: LoadAdapter) -> None:
        """Loads an adapter for a model that waits for it. It is told of where it had been told otherwise, or nothing
        yet.
        """
        try:
            self._attach(adapters, order, adapters.load(order))
        except Exception as error:  # noqa: BLE001 - the model goes on without it, and that is reported
            self._fail(order, failure(error, f"loading the adapter {order.id} again"))

    def _fail(self, order: LoadAdapter, told: Failure) -> None:
        with self._lock:
            self._pending.pop(order.uid, None)
            wanted = self._orders.pop(order.uid, None) is not None
        self._say_failed(order.uid, told if wanted else _unwanted(order), wanted=wanted)

    def _say_failed(self, uid: str, told: Failure, *, wanted: bool) -> None:
        self._tell(AdapterFailed(uid=uid, failure=told, rank=self._rank))
        if not wanted:
            self._tell(AdapterUnloaded(uid=uid, rank=self._rank))

    def _free(self, adapters: Adapters, uid: str, entry: Any) -> None:
        def free() -> None:
            try:
                adapters.remove(entry)
            except Exception as error:
                logger.exception("freeing the adapter %s: %s", uid, error)
            self._tell(AdapterUnloaded(uid=uid, rank=self._rank))

        self._freeing.submit(free)

    def _tell(self, report: Report) -> None:
        try:
            self._send(report)
        except OSError:
            logger.info("the engine is gone, a report about an adapter was not delivered")


def _unwanted(order: LoadAdapter) -> Failure:
    message = f"the adapter {order.id!r} was unloaded before it was there"
    return OperationCancelled(message, reason="LORA_UNLOADED").failure
