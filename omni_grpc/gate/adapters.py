"""LoRA adapters while the server runs: who may load which file under which name, and what there is."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import secrets
import weakref

from omni_grpc.engine import AdapterState, Wanted
from omni_grpc.fleet import Fleet, Served
from omni_grpc.gate.adapter_files import AdapterFiles, Place
from omni_grpc.gate.audit import Audit
from omni_grpc.gate.kept_adapters import KeptAdapters, of_settings, row_of
from omni_grpc.gate.models import ModelGate
from omni_grpc.gate.refusals import Refusals
from omni_grpc.gate.stored import Stored, available
from omni_grpc.store.records import AdapterSource
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import AlreadyExists, FailedPrecondition, Failure, InvalidArgument, NotFound, Violation
from omni_grpc.types.lora import LORA_FORMATS, Adapter
from omni_grpc.types.plan import LoadAdapter

LORA_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
SHA256_BYTES = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraAsk:
    """What is to be loaded. Names are those of LoadLoraRequest; "" is unset."""

    lora_id: str
    model: str
    path: str = ""
    hub_id: str = ""
    asset_id: str = ""
    filename: str = ""
    sha256: bytes = b""
    format: str = ""
    pinned: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraView:
    """An adapter at this moment. `source`: where its file came from; `load_time` in Unix seconds, None for one of the
    settings; `in_use`: how many of the caller's jobs that have not ended use it.
    """

    adapter: Adapter
    model: str
    state: AdapterState
    source: str
    load_time: float | None = None
    failure: Failure | None = None
    in_use: int = 0


class LoraGate:
    """Loading and unloading raise PermissionDenied for a caller who is no admin."""

    def __init__(self, fleet: Fleet, stored: Stored, models: ModelGate, audit: Audit) -> None:
        self._fleet = fleet
        self._stored = stored
        self._models = models
        self._audit = audit
        self._files = AdapterFiles(fleet)
        self.kept = KeptAdapters(fleet, self._files)
        self._turns: weakref.WeakValueDictionary[tuple[str, str], asyncio.Lock] = weakref.WeakValueDictionary()
        self._tasks: set[asyncio.Task[LoraView]] = set()

    async def close(self) -> None:
        """Stops what is being loaded, and forgets the copies of uploads."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.kept.close()

    # --- loading ------------------------------------------------------------------------------------------------------

    async def load(self, caller: Caller, ask: LoraAsk) -> LoraView:
        """Loads an adapter on every replica of a model; it goes on when the caller leaves. Raises every refusal:
        InvalidArgument, PermissionDenied and NotFound for the file, AlreadyExists (LORA_EXISTS) where the name is that
        of another one, and what kept a worker from loading it.
        """
        with self._audit.action(caller, "LoadLora", model=ask.model) as line:
            caller.require(Scope.ADMIN)
            _check(ask)
            line["adapter"] = ask.lora_id
            model = self._models.named(caller, ask.model)
            work = asyncio.create_task(self._load(caller, ask, model), name=f"omni_grpc-lora-{ask.lora_id}")
            self._tasks.add(work)
            work.add_done_callback(self._tasks.discard)
            work.add_done_callback(lambda done: None if done.cancelled() else done.exception())
            view = await asyncio.shield(work)
            line |= {"sha256": view.adapter.sha256, "size_bytes": view.adapter.size_bytes, "source": _kind(ask)}
            return view

    async def _load(self, caller: Caller, ask: LoraAsk, model: Served) -> LoraView:
        async with self._turns.setdefault((model.name, ask.lora_id), asyncio.Lock()):
            place = await self._place(caller, ask)
            wanted = _wanted(ask, place, self._fleet.storage.clock())
            try:
                if (same := await self._same(model, ask, place)) is not None:
                    return same
                await self._begin(model, wanted)
                await self._keep(caller, model, wanted, place)
            except BaseException:
                with contextlib.suppress(Exception):
                    await self.kept.let_go(wanted)
                raise
            return self._view(model, wanted)

    async def _place(self, caller: Caller, ask: LoraAsk) -> Place:
        """The file. Raises what it is refused for."""
        if ask.path:
            place = await self._files.at_path(ask.path, ask.filename)
        elif ask.hub_id:
            place = await self._files.on_hub(ask.hub_id, ask.filename)
        else:
            place = await self._files.of_asset(ask.asset_id, ask.filename, caller.sees)
        found = place.file.sha256
        if ask.sha256 and ask.sha256.hex() != found:
            why = f"is {ask.sha256.hex()}, but the SHA-256 of {place.told} is {found}"
            raise InvalidArgument(f"sha256: {why}", reason="SHA256_MISMATCH", violations=(Violation("sha256", why),))
        return place

    async def _same(self, model: Served, ask: LoraAsk, place: Place) -> LoraView | None:
        """The adapter of this name that is there already. Raises AlreadyExists where it is not the same."""
        known = self._fleet.adapters_of(model.name).of_id(ask.lora_id)
        if known is not None and known.failure is not None and not known.leaving:
            # what could not be loaded again makes room
            with available():
                await self.kept.remove(model.name, known)
            known = None
        view = None if known is None else self._view(model, known)
        view = view or next((one for one in self._settings(model) if one.adapter.id == ask.lora_id), None)
        if view is None and ask.lora_id in of_settings(model) and model.ready is None:
            message = f"adapter {ask.lora_id!r} is one of the settings of model {model.name!r}, which is not loaded yet"
            raise AlreadyExists(message, reason="LORA_EXISTS", metadata={"name": ask.lora_id})
        if view is None:
            return None
        if view.state is AdapterState.UNLOADING:
            message = f"adapter {ask.lora_id!r} is being unloaded; load it when that is done, or under another name"
            raise FailedPrecondition(message, reason="LORA_UNLOADING", metadata={"name": ask.lora_id})
        if view.adapter.sha256 != place.file.sha256:
            message = (
                f"adapter {ask.lora_id!r} of model {model.name!r} is another file ({view.source}); unload it first, or "
                "give another lora_id"
            )
            raise AlreadyExists(message, reason="LORA_EXISTS", metadata={"name": ask.lora_id})
        if known is not None and (known.order.pinned, known.order.format) != (ask.pinned, ask.format):
            message = f"adapter {ask.lora_id!r} is loaded with another `pinned` or `format`; unload it first"
            raise AlreadyExists(message, reason="LORA_EXISTS", metadata={"name": ask.lora_id})
        return view

    async def _begin(self, model: Served, wanted: Wanted) -> None:
        if model.engine is None:
            # it is loaded together with its model
            self._fleet.adapters_of(model.name).add(wanted)
        else:
            await model.engine.adapters.load(wanted)

    async def _keep(self, caller: Caller, model: Served, wanted: Wanted, place: Place) -> None:
        """Writes it down. Raises what keeps it from that, and nobody has it then."""
        row = row_of(model.name, wanted, place, tenant=caller.tenant, subject=caller.subject)
        try:
            with available():
                found = await self.kept.add(row, wanted)
        except BaseException:
            self._give_up(model, wanted)
            raise
        if found.uid != wanted.uid:
            # another server on this store was faster; its adapter comes with the next look
            self._give_up(model, wanted)
            message = f"adapter {wanted.id!r} of model {model.name!r} was loaded at another server just now"
            raise AlreadyExists(message, reason="LORA_EXISTS", metadata={"name": wanted.id})

    def _give_up(self, model: Served, wanted: Wanted) -> None:
        if model.engine is None:
            self._fleet.adapters_of(model.name).remove(wanted.uid)
        else:
            model.engine.adapters.give_up(wanted)

    # --- unloading ----------------------------------------------------------------------------------------------------

    async def unload(self, caller: Caller, name: str, lora_id: str, *, wait: float | None, force: bool) -> int:
        """Unloads an adapter from every replica of a model, once no job uses it; see `Engine.unused`. Returns how many
        jobs `force` failed. Raises NotFound (LORA_NOT_FOUND), FailedPrecondition (LORA_IN_USE).
        """
        with self._audit.action(caller, "UnloadLora", model=name) as line:
            caller.require(Scope.ADMIN)
            refusals = Refusals()
            refusals.required("lora_id", lora_id)
            refusals.required("model", name)
            refusals.check()
            model = self._models.named(caller, name)
            book = self._fleet.adapters_of(model.name)
            wanted = book.of_id(lora_id)
            if wanted is None and all(one.adapter.id != lora_id for one in self._settings(model)):
                message = f"model {model.name!r} has no adapter {lora_id!r}; ListLoras names those that it has"
                raise NotFound(message, reason="LORA_NOT_FOUND", metadata={"name": lora_id})
            line["adapter"] = lora_id
            if wanted is not None and wanted.fresh:
                message = f"adapter {lora_id!r} is still being loaded; unload it when that is done"
                raise FailedPrecondition(message, reason="LORA_LOADING", metadata={"name": lora_id})
            uid = lora_id if wanted is None else wanted.uid
            failed = 0
            if model.engine is not None:
                failed = await model.engine.unused(lora_id, uid, wait=wait, force=force)
            line["failed_jobs"] = failed or None
            try:
                with available():
                    if wanted is not None:
                        await self.kept.remove(model.name, wanted)
            except BaseException:
                if model.engine is not None:
                    model.engine.adapters.leave(uid, False)
                raise
            if model.engine is not None:
                await model.engine.adapters.drop(uid)
            return failed

    # --- what there is ------------------------------------------------------------------------------------------------

    def listed(self, caller: Caller, name: str = "") -> list[LoraView]:
        """The adapters of a model, of all models without a name, by their ids."""
        with self._audit.refusals(caller, "ListLoras", model=name):
            caller.require(*Scope)
            only = name or len(self._fleet.models) == 1
            of = [self._models.named(caller, name)] if only else self._models.seen(caller)
        jobs = [job.request for job in self._stored.jobs(caller) if not job.state.terminal]
        found = []
        for model in of:
            views = [*self._settings(model), *(self._view(model, one) for one in self._fleet.adapters_of(model.name))]
            for view in sorted(views, key=lambda view: view.adapter.id):
                using = [
                    job
                    for job in jobs
                    if job.model == model.name and any(lora.key == view.adapter.key for lora in job.loras)
                ]
                found.append(dataclasses.replace(view, in_use=len(using)))
        return found

    def _view(self, model: Served, wanted: Wanted) -> LoraView:
        engine = model.engine
        state = wanted.idle_state if engine is None else engine.adapters.state(wanted)
        return LoraView(
            adapter=wanted.record,
            model=model.name,
            state=state,
            source=wanted.source,
            load_time=wanted.load_time,
            failure=wanted.failure,
        )

    def _settings(self, model: Served) -> list[LoraView]:
        """Those that the model was started with, and that were not unloaded."""
        book, ready = self._fleet.adapters_of(model.name), model.ready
        if ready is None:
            return []
        return [
            LoraView(
                adapter=adapter,
                model=model.name,
                state=AdapterState.UNLOADING if adapter.id in book.faults else AdapterState.LOADED,
                source=adapter.file,
            )
            for adapter in book.of_settings(ready.found)
        ]


def _check(ask: LoraAsk) -> None:
    """Raises InvalidArgument with all that is wrong with the fields alone."""
    refusals = Refusals()
    if refusals.required("lora_id", ask.lora_id) and LORA_ID.fullmatch(ask.lora_id) is None:
        refusals.refuse("lora_id", "has to be of letters, digits, '.', '_' and '-', at most 128")
    refusals.required("model", ask.model)
    if not (ask.path or ask.hub_id or ask.asset_id):
        refusals.refuse("source", "is required: one of path, hub_id, asset_id")
    if len(ask.sha256) not in (0, SHA256_BYTES):
        refusals.refuse("sha256", f"has {len(ask.sha256)} bytes; send the 32 raw bytes, not hex")
    if ask.format not in ("", *LORA_FORMATS):
        refusals.refuse("format", f"{ask.format!r} is not known; use one of {', '.join(LORA_FORMATS)}")
    refusals.check()


def _kind(ask: LoraAsk) -> str:
    """Where a file comes from, without what a caller wrote."""
    return "path" if ask.path else "hub" if ask.hub_id else "asset"


def _wanted(ask: LoraAsk, place: Place, now: float) -> Wanted:
    order = LoadAdapter(
        id=ask.lora_id,
        uid=f"{ask.lora_id}#{secrets.token_hex(8)}",
        path=str(place.file.path),
        sha256=place.file.sha256,
        format=ask.format,
        pinned=ask.pinned,
    )
    return Wanted(
        order=order,
        source=place.told,
        size_bytes=place.file.size_bytes,
        load_time=now,
        asset=place.place if place.source is AdapterSource.ASSET else "",
    )
