"""Uploaded media, in memory until it expires."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator

from omni_grpc.engine.forgotten import Forgotten
from omni_grpc.engine.tally import Tally
from omni_grpc.store.records import Asset, Cause
from omni_grpc.types.errors import ResourceExhausted


class Assets:
    """Assets by id, at most `budget` bytes in total; each is kept for `retention` seconds after its last use.

    An upload that does not fit is refused; no other asset is evicted for it. All methods run on the engine's thread.
    """

    def __init__(
        self,
        budget: int,
        retention: float,
        clock: Callable[[], float] = time.time,
        *,
        forgotten: Forgotten | None = None,
    ) -> None:
        self._forgotten = Forgotten() if forgotten is None else forgotten
        self._budget = budget
        self._retention = retention
        self._clock = clock
        self._files: dict[str, tuple[Asset, bytes]] = {}
        self._reserved = 0
        self._held = Tally()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._files)

    def asset_bytes(self, tenant: str) -> int:
        """The size of one tenant's assets, with those that are about to arrive."""
        self.sweep()
        return self._held[tenant]

    @contextlib.contextmanager
    def reserved(self, size: int, *, tenant: str = "") -> Iterator[None]:
        """Reserves room for an upload while its bytes arrive, before `put`. Raises ResourceExhausted if there is none:
        ASSET_TOO_LARGE if it exceeds the whole budget, else ASSETS_FULL (with `retry_after`).
        """
        self._require_room(size)
        self._reserved += size
        self._held.add(tenant, size)
        try:
            yield
        finally:
            self._reserved -= size
            self._held.add(tenant, -size)

    def put(self, data: bytes, mime_type: str, *, sha256: str = "", tenant: str = "") -> Asset:
        """Stores the bytes under a new id. `sha256`: their hash in hex, if known. Raises like `reserved`."""
        self._require_room(len(data))
        now = self._clock()
        asset = Asset(
            id=f"asset-{secrets.token_hex(16)}",
            mime_type=mime_type,
            size_bytes=len(data),
            sha256=sha256 or hashlib.sha256(data).hexdigest(),
            create_time=now,
            expire_time=now + self._retention,
            tenant=tenant,
        )
        self._files[asset.id] = (asset, data)
        self.size_bytes += len(data)
        self._held.add(tenant, len(data))
        return asset

    def get(self, asset_id: str, tenant: str | None = None) -> tuple[Asset, bytes]:
        """The asset and its bytes; its expiry is extended. Raises NotFound (ASSET_NOT_FOUND), with `tenant` also for
        one of another tenant.
        """
        asset, data = self._find(asset_id, tenant)
        asset = dataclasses.replace(asset, expire_time=self._clock() + self._retention)
        self._files[asset_id] = (asset, data)
        return asset, data

    def delete(self, asset_id: str) -> None:
        """Raises NotFound like `get`."""
        self._find(asset_id)
        self._drop(asset_id, Cause.DELETED)

    def sweep(self) -> None:
        """Drops expired assets. Every other method does so too; this serves a server without traffic."""
        now = self._clock()
        for asset_id in [asset.id for asset, _ in self._files.values() if asset.expire_time <= now]:
            self._drop(asset_id, Cause.EXPIRED)

    def _find(self, asset_id: str, tenant: str | None = None) -> tuple[Asset, bytes]:
        self.sweep()
        found = self._files.get(asset_id)
        if found is None or tenant not in (None, found[0].tenant):
            raise self._forgotten.not_found(asset_id, reason="ASSET_NOT_FOUND", tenant=tenant, hint="upload it again")
        return found

    def _drop(self, asset_id: str, cause: Cause) -> None:
        asset, _ = self._files.pop(asset_id)
        self._forgotten.add(asset_id, cause, tenant=asset.tenant)
        self.size_bytes -= asset.size_bytes
        self._held.add(asset.tenant, -asset.size_bytes)

    def _require_room(self, size: int) -> None:
        self.sweep()
        if size > self._budget:
            message = f"the asset has {size} bytes, but the store holds only {self._budget}; raise --asset-budget"
            raise ResourceExhausted(message, reason="ASSET_TOO_LARGE")
        free = self._budget - self.size_bytes - self._reserved
        if size > free:
            expiries = [asset.expire_time for asset, _ in self._files.values()]
            wait = max(0.0, min(expiries) - self._clock()) if expiries else self._retention
            message = (
                f"the asset has {size} bytes, but only {free} of {self._budget} are free; delete unused assets "
                f"or wait until the next one expires in {wait:.0f} s"
            )
            raise ResourceExhausted(message, reason="ASSETS_FULL", retry_after=max(wait, 1.0))
