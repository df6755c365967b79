import asyncio
import hashlib

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine import engine as engine_module
from omni_grpc.engine.assets import Assets
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
    return Assets(budget=100, retention=60.0, clock=clock)


def test_an_asset_comes_back_as_it_was(assets):
    asset = assets.put(b"abc", "image/png")
    assert (asset.mime_type, asset.size_bytes, asset.sha256) == ("image/png", 3, hashlib.sha256(b"abc").hexdigest())
    assert (asset.create_time, asset.expire_time) == (1000.0, 1060.0)
    assert assets.get(asset.id) == (asset, b"abc")
    assert (len(assets), assets.size_bytes) == (1, 3)


def test_asset_ids_are_made_by_the_server_and_differ(assets):
    ids = {assets.put(b"a", "../../evil").id for _ in range(50)}
    assert len(ids) == 50
    assert all(name.removeprefix("asset-").isalnum() for name in ids)


def test_use_puts_the_end_off(assets, clock):
    asset = assets.put(b"abc", "image/png")
    clock.now += 59
    assert assets.get(asset.id)[0].expire_time == clock.now + 60
    clock.now += 59
    assets.get(asset.id)
    clock.now += 60
    with pytest.raises(NotFound) as caught:
        assets.get(asset.id)
    assert caught.value.reason == "ASSET_NOT_FOUND"
    assert (len(assets), assets.size_bytes) == (0, 0)


def test_sweep_forgets_what_has_expired_alone(assets, clock):
    assets.put(b"old", "image/png")
    clock.now += 30
    young = assets.put(b"young", "image/png")
    clock.now += 30
    assets.sweep()
    assert (len(assets), assets.size_bytes) == (1, 5)
    assert assets.get(young.id)[1] == b"young"


def test_delete_frees_the_bytes_and_the_id(assets):
    asset = assets.put(b"abc", "image/png")
    assets.delete(asset.id)
    assert (len(assets), assets.size_bytes) == (0, 0)
    for call in (assets.get, assets.delete):
        with pytest.raises(NotFound, match="upload it again"):
            call(asset.id)


def test_what_does_not_fit_is_refused_and_nothing_is_lost(assets, clock):
    first = assets.put(bytes(60), "video/mp4")
    clock.now += 20
    with pytest.raises(ResourceExhausted, match="40 of 100 are free") as caught:
        assets.put(bytes(41), "video/mp4")
    assert caught.value.reason == "ASSETS_FULL"
    assert caught.value.failure.retry_after == 40
    assert assets.get(first.id)[1] == bytes(60)
    assets.put(bytes(40), "video/mp4")
    assert assets.size_bytes == 100


def test_room_is_made_by_expiry(assets, clock):
    assets.put(bytes(100), "video/mp4")
    clock.now += 60
    assets.put(bytes(100), "video/mp4")
    assert (len(assets), assets.size_bytes) == (1, 100)


def test_more_than_the_whole_budget_never_fits(assets):
    with pytest.raises(ResourceExhausted, match="asset-budget") as caught:
        assets.put(bytes(101), "video/mp4")
    assert caught.value.reason == "ASSET_TOO_LARGE"
    assert caught.value.failure.retry_after is None


def test_uploads_in_flight_count(assets):
    with assets.reserved(70):
        with pytest.raises(ResourceExhausted), assets.reserved(31):
            pass
        with assets.reserved(30):
            pass
    with pytest.raises(RuntimeError), assets.reserved(70):
        raise RuntimeError
    assert assets.put(bytes(100), "video/mp4").size_bytes == 100


def test_a_hash_that_is_known_is_not_made_again(assets):
    assert assets.put(b"abc", "image/png", sha256="00ff").sha256 == "00ff"


async def test_an_idle_server_forgets_what_has_expired(monkeypatch):
    monkeypatch.setattr(engine_module, "ASSET_SWEEP", 0.01)
    engine, _ = await started_engine(asset_retention=0.03)
    first = engine.assets.put(b"abc", "image/png")
    for _ in range(2):
        async with asyncio.timeout(10):
            while len(engine.assets):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert engine.assets.size_bytes == 0
        # the sweep goes on
        assert engine.assets.put(b"abc", "image/png").id != first.id
    await engine.close()


def test_its_settings_are_in_the_tree():
    jobs = EngineConfig.from_settings(model="m", asset_budget="5", asset_retention="7").jobs
    assert (jobs.asset_budget, jobs.asset_retention) == (5, 7.0)
