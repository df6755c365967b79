"""The adapters that the store has, and what this server has made of them: after a start, and when another server on the
same store has loaded or unloaded one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from omni_grpc.engine import Wanted
from omni_grpc.fleet import Fleet, Served
from omni_grpc.gate.adapter_files import AdapterFiles, Place
from omni_grpc.store.records import AdapterRow, AdapterSource
from omni_grpc.store.seam import StoreError
from omni_grpc.types.errors import Code, Failure, OmniError
from omni_grpc.types.plan import LoadAdapter

logger = logging.getLogger(__name__)


class KeptAdapters:
    """`on_change` is called when other servers are to look."""

    def __init__(self, fleet: Fleet, files: AdapterFiles) -> None:
        self._fleet = fleet
        self._files = files
        self._rows = fleet.storage.store.adapters
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_change: Callable[[], None] = lambda: None

    async def look(self) -> None:
        """Loads what is there, and unloads what is not there any more. Raises StoreError."""
        async with self._turn:
            rows = await self._rows.all()
            kept = {row.uid for row in rows}
            for model in {row.model for row in rows} | {model.name for model in self._fleet.models}:
                for wanted in self._fleet.adapters_of(model):
                    if wanted.kept and wanted.uid not in kept:
                        wanted.kept = False
                        self._soon(self._leave(model, wanted))
            for row in rows:
                if self._fleet.adapters_of(row.model).of_uid(row.uid) is None:
                    await self._take(row)

    async def add(self, row: AdapterRow, wanted: Wanted) -> AdapterRow:
        """Keeps what was loaded here. Returns what there is of this id, which another server may have loaded. Raises
        StoreError.
        """
        async with self._turn:
            found = await self._rows.add(row)
            wanted.kept = found.uid == row.uid
        if wanted.kept:
            self.on_change()
        return found

    async def remove(self, model: str, wanted: Wanted) -> None:
        """Forgets an adapter, which is in no book afterwards. Raises StoreError."""
        async with self._turn:
            if wanted.kept:
                await self._rows.delete(row_of(model, wanted))
                wanted.kept = False
            self._fleet.adapters_of(model).remove(wanted.uid)
        await self.let_go(wanted)
        self.on_change()

    async def let_go(self, wanted: Wanted) -> None:
        """The file of an adapter is not needed any more by this one."""
        if wanted.asset and not self._fleet.needs_asset(wanted.asset):
            self._files.forget(wanted.asset)
            await self._fleet.assets.let_go(wanted.asset)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._files.close)

    # --- parts --------------------------------------------------------------------------------------------------------

    async def _take(self, row: AdapterRow) -> None:
        """An adapter that is not loaded here."""
        model = next((model for model in self._fleet.models if model.name == row.model), None)
        failure, place = None, None
        try:
            place = await self._files.again(row)
        except OmniError as error:
            failure = error.failure
        if model is not None and row.lora_id in of_settings(model):
            message = (
                f"adapter {row.lora_id!r} is one of the settings too (--lora); unload this one, or rename that one"
            )
            failure = Failure(code=Code.ALREADY_EXISTS, reason="LORA_EXISTS", message=message)
        wanted = _wanted(row, place)
        if failure is not None:
            logger.error("adapter %s of model %s is not loaded again: %s", row.lora_id, row.model, failure.message)
            wanted.failure = failure
        book = self._fleet.adapters_of(row.model)
        for other in book:
            if other.id == row.lora_id and not other.leaving:
                # it was unloaded elsewhere, and its task has not begun
                other.leaving += 1
        # at once, so that nobody takes it a second time
        book.add(wanted)
        if model is None or model.engine is None or failure is not None:
            return
        wanted.fresh = True
        loading = asyncio.ensure_future(model.engine.adapters.load(wanted))
        if not any(replica.open for replica in model.engine.replicas):
            # it is loaded with its model
            await _settled(loading, wanted, model)
        else:
            self._soon(_settled(loading, wanted, model))

    async def _leave(self, name: str, wanted: Wanted) -> None:
        """Another server has unloaded it: it goes when the last job that uses it here has ended."""
        model = next((model for model in self._fleet.models if model.name == name), None)
        if model is not None and model.engine is not None:
            await model.engine.unused(wanted.id, wanted.uid, wait=float("inf"), force=False)
            await model.engine.adapters.drop(wanted.uid)
        else:
            self._fleet.adapters_of(name).remove(wanted.uid)
        logger.info("adapter %s of model %s was unloaded at another server", wanted.id, name)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(_reported(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _settled(loading: asyncio.Future[Any], wanted: Wanted, model: Served) -> None:
    """Waits until an adapter that was loaded before is loaded. One that cannot be stays known, with the reason."""
    try:
        await loading
    except OmniError as error:
        logger.error("adapter %s of model %s is not loaded again: %s", wanted.id, model.name, error)
        wanted.failure, wanted.fresh = error.failure, False
        if model.engine is not None:
            model.engine.adapters.book.add(wanted)


async def _reported(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except StoreError as error:
        logger.warning("the store is away: %s", error)
    except OmniError as error:
        logger.warning("an adapter that another server unloaded stays: %s", error)
    except Exception:
        logger.exception("unexpected error with an adapter of another server")


def of_settings(model: Served) -> set[str]:
    """The ids of the adapters of a model's settings."""
    loras = model.config.loras
    return set() if loras is None else set(loras.lora or {})


def row_of(
    model: str, wanted: Wanted, place: Place | None = None, *, tenant: str = "", subject: str = ""
) -> AdapterRow:
    """What the store keeps of an adapter. Without `place`, its key alone is right."""
    order = wanted.order
    return AdapterRow(
        model=model,
        lora_id=order.id,
        uid=order.uid,
        source=AdapterSource.PATH if place is None else place.source,
        place="" if place is None else place.place,
        filename="" if place is None else place.filename,
        sha256=order.sha256,
        size_bytes=wanted.size_bytes,
        format=order.format,
        pinned=order.pinned,
        create_time=wanted.load_time,
        tenant=tenant,
        subject=subject,
    )


def _wanted(row: AdapterRow, place: Place | None) -> Wanted:
    order = LoadAdapter(
        id=row.lora_id,
        uid=row.uid,
        path="" if place is None else str(place.file.path),
        sha256=row.sha256,
        format=row.format,
        pinned=row.pinned,
    )
    return Wanted(
        order=order,
        source=row.place + (f"/{row.filename}" if row.filename else "") if place is None else place.told,
        size_bytes=row.size_bytes,
        load_time=row.create_time,
        kept=True,
        asset=row.place if row.source is AdapterSource.ASSET else "",
    )
