import asyncio
import hashlib

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.store import storage as storage_module
from omni_grpc.store.assets import Assets
from omni_grpc.store.forgotten import Forgotten
from omni_grpc.store.memory import MemoryBlobs, MemoryStore
from omni_grpc.types.errors import NotFound, ResourceExhausted
from tests.engine.manual import started_engine


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def assets(clock):
    return Assets(MemoryStore().files, MemoryBlobs(), Forgotten("here"), budget=100, retention=60.0, clock=clock)


async def put(assets, data, mime_type, **options):
    """An upload as it comes in: its room first."""

    async def pieces():
        yield data

    async with assets.reserved(len(data), **options):
        return await assets.put(pieces(), mime_type, sha256=lambda: hashlib.sha256(data).hexdigest(), **options)


async def get(assets, name):
    return await assets.use(name), await assets.data(name)


async def test_an_asset_comes_back_as_it_was(assets):
    asset = await put(assets, b"abc", "image/png")
    assert (asset.mime_type, asset.size_bytes, asset.sha256) == ("image/png", 3, hashlib.sha256(b"abc").hexdigest())
    assert (asset.create_time, asset.expire_time) == (1000.0, 1060.0)
    assert await get(assets, asset.id) == (asset, b"abc")
    assert assets.size_bytes == 3


async def test_asset_ids_are_made_by_the_server_and_differ(assets):
    ids = {(await put(assets, b"a", "../../evil")).id for _ in range(50)}
    assert len(ids) == 50
    assert all(name.removeprefix("asset-").isalnum() for name in ids)


async def test_use_puts_the_end_off(assets, clock):
    asset = await put(assets, b"abc", "image/png")
    clock.now += 59
    assert (await get(assets, asset.id))[0].expire_time == clock.now + 60
    clock.now += 59
    await get(assets, asset.id)
    clock.now += 60
    with pytest.raises(NotFound) as caught:
        await get(assets, asset.id)
    assert caught.value.reason == "ASSET_NOT_FOUND"
    assert assets.size_bytes == 0


async def test_sweep_forgets_what_has_expired_alone(assets, clock):
    await put(assets, b"old", "image/png")
    clock.now += 30
    young = await put(assets, b"young", "image/png")
    clock.now += 30
    await assets.sweep()
    assert assets.size_bytes == 5
    assert (await get(assets, young.id))[1] == b"young"


async def test_delete_frees_the_bytes_and_the_id(assets):
    asset = await put(assets, b"abc", "image/png")
    await assets.delete(asset.id)
    assert assets.size_bytes == 0
    for call in (assets.use, assets.data, assets.delete):
        with pytest.raises(NotFound, match="upload it again"):
            await call(asset.id)


async def test_what_does_not_fit_is_refused_and_nothing_is_lost(assets, clock):
    first = await put(assets, bytes(60), "video/mp4")
    clock.now += 20
    with pytest.raises(ResourceExhausted, match="40 of 100 are free") as caught:
        await put(assets, bytes(41), "video/mp4")
    assert caught.value.reason == "ASSETS_FULL"
    assert caught.value.failure.retry_after == 40
    assert (await get(assets, first.id))[1] == bytes(60)
    await put(assets, bytes(40), "video/mp4")
    assert assets.size_bytes == 100


async def test_room_is_made_by_expiry(assets, clock):
    await put(assets, bytes(100), "video/mp4")
    clock.now += 60
    await put(assets, bytes(100), "video/mp4")
    assert assets.size_bytes == 100


async def test_more_than_the_whole_budget_never_fits(assets):
    with pytest.raises(ResourceExhausted, match="asset-budget") as caught:
        await put(assets, bytes(101), "video/mp4")
    assert caught.value.reason == "ASSET_TOO_LARGE"
    assert caught.value.failure.retry_after is None


async def test_uploads_in_flight_count(assets):
    async with assets.reserved(70):
        with pytest.raises(ResourceExhausted):
            async with assets.reserved(31):
                pass
        async with assets.reserved(30):
            pass
    with pytest.raises(RuntimeError):
        async with assets.reserved(70):
            raise RuntimeError
    assert (await put(assets, bytes(100), "video/mp4")).size_bytes == 100


async def test_an_upload_that_is_not_what_it_said_leaves_nothing(assets):
    def check():
        raise ValueError("another hash")

    async def pieces():
        yield b"abc"

    with pytest.raises(ValueError, match="another hash"):
        await assets.put(pieces(), "image/png", sha256=lambda: "", check=check)
    assert assets.size_bytes == 0
    assert [name async for name in assets._blobs.names("", float("inf"))] == []


async def test_an_idle_server_forgets_what_has_expired(monkeypatch):
    monkeypatch.setattr(storage_module, "ASSET_SWEEP", 0.01)
    engine, _ = await started_engine(asset_retention=0.03)
    first = await put(engine.assets, b"abc", "image/png")
    for _ in range(2):
        async with asyncio.timeout(10):
            while engine.assets.size_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert engine.assets.size_bytes == 0
        # the sweep goes on
        assert (await put(engine.assets, b"abc", "image/png")).id != first.id
    await engine.close()


async def test_its_settings_are_in_the_tree():
    jobs = EngineConfig.from_settings(model="m", asset_budget="5", asset_retention="7").jobs
    assert (jobs.asset_budget, jobs.asset_retention) == (5, 7.0)
