"""The adapters that a model is to have, beside those of its settings: whatever workers it has at the moment."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterator, Sequence

from omni_grpc.types.errors import Failure
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.lora import Adapter
from omni_grpc.types.plan import LoadAdapter

LOST_TWICE = 2
"""Workers that died while they loaded an adapter, after which it is not loaded again."""


class AdapterState(enum.StrEnum):
    """PENDING: no worker has it, and the next one that comes or wakes loads it before it takes jobs. UNLOADING: jobs
    that use it end. FAILED: it could not be loaded again.
    """

    LOADED = "LOADED"
    PENDING = "PENDING"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"
    FAILED = "FAILED"


@dataclasses.dataclass(slots=True, kw_only=True)
class Wanted:
    """An adapter that is to be loaded by `order`. `adapter`: what the first worker that loaded it has told; `failure`:
    why it cannot be used. `fresh`: whether it loads at all is still to be seen, so that no request can name it.
    `leaving`: how many calls are unloading it. `kept`: the store has it; `asset`: the upload that its file is, "" for
    any other. `deaths`: workers that died while they loaded it again. `source`: where its file came from, as callers
    are told; `size_bytes`: of that file; `load_time` in Unix seconds.
    """

    order: LoadAdapter
    source: str = ""
    size_bytes: int = 0
    load_time: float = 0.0
    adapter: Adapter | None = None
    failure: Failure | None = None
    fresh: bool = False
    leaving: int = 0
    kept: bool = False
    asset: str = ""
    deaths: int = 0

    @property
    def id(self) -> str:
        return self.order.id

    @property
    def uid(self) -> str:
        return self.order.uid

    @property
    def record(self) -> Adapter:
        """What is known of it: before any worker has loaded it, without its layers."""
        if self.adapter is not None:
            return self.adapter
        order = self.order
        return Adapter(
            id=order.id,
            uid=order.uid,
            file=order.path,
            sha256=order.sha256,
            format=order.format,
            rank=0,
            size_bytes=self.size_bytes,
            applied={},
            pinned=order.pinned,
        )

    @property
    def idle_state(self) -> AdapterState:
        """Its state while its model is not loaded."""
        if self.failure is not None:
            return AdapterState.FAILED
        return AdapterState.UNLOADING if self.leaving else AdapterState.PENDING

    @property
    def fault(self) -> str:
        """Why new requests cannot name it, "" if they can."""
        if self.failure is not None:
            return f"could not be loaded again: {self.failure.message}"
        if self.leaving:
            return "is being unloaded"
        return "is still being loaded" if self.fresh else ""


class AdapterBook:
    """Of one id there is one, and others that are being unloaded. It outlives the engines of its model."""

    def __init__(self) -> None:
        self._wanted: dict[str, Wanted] = {}
        self._leaving: collections.Counter[str] = collections.Counter()
        """Those of the settings that are being unloaded, with how many calls do."""
        self._gone: set[str] = set()
        """Those of the settings that were unloaded."""

    def __iter__(self) -> Iterator[Wanted]:
        return iter(list(self._wanted.values()))

    def of_id(self, lora_id: str) -> Wanted | None:
        """The newest."""
        return next((wanted for wanted in reversed(self._wanted.values()) if wanted.id == lora_id), None)

    def of_uid(self, uid: str) -> Wanted | None:
        return self._wanted.get(uid)

    def add(self, wanted: Wanted) -> None:
        assert all(one.leaving for one in self if one.id == wanted.id), f"{wanted.id} is there already"
        self._wanted[wanted.uid] = wanted

    def leave(self, uid: str, count: int) -> None:
        """So many calls more are unloading an adapter, of the settings too."""
        if (wanted := self._wanted.get(uid)) is not None:
            wanted.leaving += count
        else:
            self._leaving[uid] += count

    def remove(self, uid: str) -> None:
        """Nobody is to have it any more."""
        if self._wanted.pop(uid, None) is None and uid in self._leaving:
            del self._leaving[uid]
            self._gone.add(uid)

    def of_settings(self, found: WorkerFindings | None) -> list[Adapter]:
        """Those of the settings that were not unloaded: their id is their uid."""
        loras = () if found is None else found.loras
        return [adapter for adapter in loras if adapter.key == adapter.id and adapter.key not in self._gone]

    def keys(self, found: WorkerFindings | None) -> set[str]:
        """The uids that a worker is to have."""
        own = {adapter.key for adapter in self.of_settings(found)}
        return own | {wanted.uid for wanted in self if wanted.failure is None}

    def orders(self) -> Sequence[LoadAdapter]:
        """How to get those that are not of the settings."""
        return [wanted.order for wanted in self if wanted.failure is None]

    def told(self, found: WorkerFindings) -> WorkerFindings:
        """What a worker found out, with the adapters as they are now: all that a result may tell of."""
        return dataclasses.replace(found, loras=(*self.of_settings(found), *(wanted.record for wanted in self)))

    def usable(self, found: WorkerFindings) -> WorkerFindings:
        """The same with those alone that new requests can name."""
        own = (adapter for adapter in self.of_settings(found) if not self._leaving[adapter.key])
        return dataclasses.replace(found, loras=(*own, *(wanted.record for wanted in self if not wanted.fault)))

    @property
    def faults(self) -> dict[str, str]:
        """The ids that new requests cannot name, each with the reason."""
        leaving = {uid: "is being unloaded" for uid, count in self._leaving.items() if count}
        return leaving | {wanted.id: wanted.fault for wanted in self if wanted.fault}
