"""Uploaded media, and files of profiles, until they expire."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable

from omni_grpc.store.artifacts import delete_blobs
from omni_grpc.store.forgotten import Forgotten
from omni_grpc.store.records import Asset, Cause
from omni_grpc.store.seam import Blobs, FileRows, MissingBlob
from omni_grpc.store.tally import Tally
from omni_grpc.types.errors import NotFound, ResourceExhausted

ASSET, PROFILE = "asset-", "profile-"
"""What the ids of uploads and of files of profiles begin with."""
SWEPT_AT_ONCE = 1000
"""Most uploads that one sweep drops."""
HELD_SECONDS = 100 * 365 * 86400.0
"""How far away the expiry of an upload is that something else needs."""


class Assets:
    """Assets by id, at most `budget` bytes in total; each is kept for `retention` seconds after its last use. It is the
    blob of its id.

    An upload that does not fit is refused; no other asset is evicted for it.
    """

    def __init__(
        self,
        files: FileRows,
        blobs: Blobs,
        forgotten: Forgotten,
        *,
        budget: int,
        retention: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._files = files
        self._blobs = blobs
        self._forgotten = forgotten
        self._budget = budget
        self._retention = retention
        self._clock = clock
        self._held = Tally()
        self._arriving = Tally()

    async def count(self) -> None:
        """Learns from the store who keeps how much."""
        self._held = Tally(await self._files.asset_bytes())

    @property
    def size_bytes(self) -> int:
        """With what is about to arrive."""
        return self._held.total + self._arriving.total

    def asset_bytes(self, tenant: str) -> int:
        """The size of one tenant's assets, with those that are about to arrive."""
        return self._held[tenant] + self._arriving[tenant]

    @contextlib.asynccontextmanager
    async def reserved(self, size: int, *, tenant: str = "") -> AsyncIterator[None]:
        """Reserves room for an upload while its bytes arrive. Raises ResourceExhausted if there is none:
        ASSET_TOO_LARGE if it exceeds the whole budget, else ASSETS_FULL (with `retry_after`).
        """
        await self._require_room(size)
        self._arriving.add(tenant, size)
        try:
            yield
        finally:
            self._arriving.add(tenant, -size)

    async def put(
        self,
        pieces: AsyncIterable[bytes],
        mime_type: str,
        *,
        sha256: Callable[[], str],
        check: Callable[[], None] = lambda: None,
        tenant: str = "",
        kind: str = ASSET,
    ) -> Asset:
        """Keeps what the pieces are together under a new id, which begins with `kind`. Once all of them have come,
        `check` may raise, and `sha256` says their hash in hex; then there is no such asset, or there is. Its room has
        been reserved.
        """
        name = f"{kind}{secrets.token_hex(16)}"
        size = await self._blobs.put(name, pieces)
        try:
            check()
            now = self._clock()
            asset = Asset(
                id=name,
                mime_type=mime_type,
                size_bytes=size,
                sha256=sha256(),
                create_time=now,
                expire_time=now + self._retention,
                tenant=tenant,
            )
            await self._files.put_asset(asset)
        except BaseException:
            await delete_blobs(self._blobs, [name])
            raise
        self._held.add(tenant, size)
        return asset

    async def use(self, asset_id: str, tenant: str | None = None) -> Asset:
        """An asset, whose expiry is extended. Raises NotFound (ASSET_NOT_FOUND), with `tenant` also for one of another
        tenant.
        """
        asset = await self._find(asset_id, tenant)
        # one that is held stays so
        later = max(asset.expire_time, self._clock() + self._retention)
        return await self._touched(asset, later)

    async def hold(self, asset_id: str, tenant: str | None = None) -> Asset:
        """An asset, which does not expire until `let_go`. Raises NotFound like `use`."""
        return await self._touched(await self._find(asset_id, tenant), self._clock() + HELD_SECONDS)

    async def let_go(self, asset_id: str) -> None:
        """An asset that was held expires as others do; nothing where it is not there any more."""
        await self._files.touch_asset(asset_id, self._clock() + self._retention)

    def pieces(self, asset_id: str) -> AsyncIterator[bytes]:
        """Its bytes. Raises MissingBlob for one that is gone."""
        return self._blobs.read(asset_id)

    async def _touched(self, asset: Asset, expire_time: float) -> Asset:
        await self._files.touch_asset(asset.id, expire_time)
        return dataclasses.replace(asset, expire_time=expire_time)

    async def data(self, asset_id: str) -> bytes:
        """All of its bytes. Raises NotFound for one that is gone."""
        try:
            return b"".join([piece async for piece in self._blobs.read(asset_id)])
        except MissingBlob:
            raise self._not_found(asset_id, None) from None

    async def delete(self, asset_id: str, tenant: str | None = None) -> Asset:
        """Raises NotFound like `use`."""
        asset = await self._find(asset_id, tenant)
        await self._drop(asset, Cause.DELETED)
        return asset

    async def sweep(self) -> None:
        """Drops expired assets."""
        for asset_id in await self._files.expired_assets(self._clock(), SWEPT_AT_ONCE):
            if (asset := await self._files.asset(asset_id)) is not None:
                await self._drop(asset, Cause.EXPIRED)

    async def _find(self, asset_id: str, tenant: str | None) -> Asset:
        asset = await self._files.asset(asset_id)
        if asset is not None and asset.expire_time <= self._clock():
            await self._drop(asset, Cause.EXPIRED)
            asset = None
        if asset is None or tenant not in (None, asset.tenant):
            await self._forgotten.look_up(asset_id, self._files)
            raise self._not_found(asset_id, tenant)
        return asset

    async def _drop(self, asset: Asset, cause: Cause) -> None:
        if await self._files.delete_asset(asset.id, cause):
            self._forgotten.add(asset.id, cause, tenant=asset.tenant)
            self._held.add(asset.tenant, -asset.size_bytes)
        await delete_blobs(self._blobs, [asset.id])

    async def _require_room(self, size: int) -> None:
        if size > self._budget:
            message = f"the asset has {size} bytes, but the store holds only {self._budget}; raise --asset-budget"
            raise ResourceExhausted(message, reason="ASSET_TOO_LARGE")
        await self.sweep()
        free = self._budget - self.size_bytes
        if size > free:
            wait = await self._next_expiry()
            message = (
                f"the asset has {size} bytes, but only {free} of {self._budget} are free; delete unused assets "
                f"or wait until the next one expires in {wait:.0f} s"
            )
            raise ResourceExhausted(message, reason="ASSETS_FULL", retry_after=max(wait, 1.0))

    async def _next_expiry(self) -> float:
        """Seconds until the next asset expires; the retention where there is none."""
        first = await self._files.expired_assets(float("inf"), 1)
        asset = await self._files.asset(first[0]) if first else None
        return self._retention if asset is None else max(0.0, asset.expire_time - self._clock())

    def _not_found(self, asset_id: str, tenant: str | None) -> NotFound:
        return self._forgotten.not_found(asset_id, reason="ASSET_NOT_FOUND", tenant=tenant, hint="upload it again")
