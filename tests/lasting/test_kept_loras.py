"""Adapters that were loaded are there after a restart, and at every server of one store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import Code, Failure
from omni_grpc.v1 import artifact_pb2
from tests.lasting.lives import reason, restarted
from tests.server.service import refusal, until
from tests.server.test_loras import FAILED, LOADED, UNLOADING, adapter, content, load, loras, unload, using

pytestmark = pytest.mark.service


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    return tmp_path / "loras"


async def test_a_server_that_is_started_again_has_its_adapters_and_its_jobs_use_them(lasting, roots):
    lasting.settings["lora_roots"] = str(roots)
    life = await lasting.start(max_num_seqs=1)
    first = await load(life, adapter(roots), pinned=True)
    second = await load(life, adapter(roots, "second.safetensors", 1), "second")
    await load(life, adapter(roots, "third.safetensors", 2), "third")
    await unload(life, "third")
    life.executor.gates[Lane.STEP].close()
    await life.create()
    waiting = await life.create(sampling=using("style", "second"))
    life = await restarted(lasting, life)
    await life.watch(waiting.job_id)
    job = await life.get(waiting.job_id)
    assert [one.lora_id for one in job.effective.loras] == ["style", "second"]
    found = await loras(life)
    assert set(found) == {"style", "second"}
    assert {found["style"].uid, found["second"].uid} == {first.uid, second.uid} == set(life.executor.adapters)
    assert (found["style"].pinned, found["style"].load_time) == (True, first.load_time)
    assert await load(life, adapter(roots), pinned=True) == found["style"]
    await unload(life)
    life = await restarted(lasting, life)
    assert set(await loras(life)) == {"second"}


async def test_what_cannot_be_loaded_again_is_told_and_its_jobs_fail(lasting, roots):
    lasting.settings["lora_roots"] = str(roots)
    life = await lasting.start(max_num_seqs=1)
    for number, name in enumerate(("gone", "changed", "refused", "fine")):
        await load(life, adapter(roots, f"{name}.safetensors", number), name)
    life.executor.gates[Lane.STEP].close()
    await life.create()
    jobs = {name: await life.create(sampling=using(name)) for name in ("gone", "changed", "refused", "fine")}
    (roots / "gone.safetensors").unlink()
    adapter(roots, "changed.safetensors", 9)
    failure = Failure(code=Code.INVALID_ARGUMENT, reason="BAD_LORA", message="its shapes are wrong")

    def cannot(life):
        life.executor.unloadable["refused"] = failure

    life = await restarted(lasting, life, before=cannot)
    for job in jobs.values():
        await life.watch(job.job_id)
    ended = {name: await life.get(job.job_id) for name, job in jobs.items()}
    assert ended.pop("fine").step == 3
    assert {reason(job) for job in ended.values()} == {"LORA_NOT_LOADED"}
    found = await loras(life)
    assert {name: lora.state for name, lora in found.items()} == {
        "gone": FAILED,
        "changed": FAILED,
        "refused": FAILED,
        "fine": LOADED,
    }
    assert "gone.safetensors" in found["gone"].error.message
    assert "has changed: its SHA-256 is" in found["changed"].error.message
    error = await refusal(life.create(sampling=using("gone")))
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", ["sampling.loras.lora_id"])
    assert "could not be loaded again" in error.message
    assert (await load(life, adapter(roots, "gone.safetensors"), "gone")).state == LOADED
    await unload(life, "changed")
    life = await restarted(lasting, life)
    assert set(await loras(life)) == {"gone", "refused", "fine"}


async def test_an_upload_is_there_again_after_its_time(lasting):
    life = await lasting.start(asset_retention=1)
    header = artifact_pb2.UploadHeader(mime_type="application/octet-stream", size_bytes=len(content()))
    messages = [artifact_pb2.UploadAssetRequest(header=header), artifact_pb2.UploadAssetRequest(data=content())]
    asset_id = (await life.artifacts.UploadAsset(iter(messages))).asset_id
    await load(life, asset_id=asset_id)
    await life.stop()
    await asyncio.sleep(1.1)
    life = await lasting.start(asset_retention=1)
    assert (await loras(life))["style"].state == LOADED
    assert Path(next(iter(life.executor.adapters.values())).file).read_bytes() == content()  # noqa: ASYNC240


async def test_a_store_that_is_away_leaves_nothing_half_done(lasting, roots):
    lasting.settings["lora_roots"] = str(roots)
    life = await lasting.start()
    life.trouble.fail("adapters.add")
    error = await refusal(load(life, adapter(roots)))
    assert (error.code, error.reason) == ("UNAVAILABLE", "STORE_UNAVAILABLE")
    await until(lambda: not life.executor.adapters)
    assert await loras(life) == {}
    life.trouble.mend()
    await load(life, adapter(roots))
    life.trouble.fail("adapters.delete")
    error = await refusal(unload(life))
    assert error.reason == "STORE_UNAVAILABLE"
    assert (await life.finished(sampling=using("style"))).step == 3, "it can be used as before"
    life.trouble.mend()
    await unload(life)


@pytest.fixture
async def pair(shared, roots):
    """Two servers that know of each other."""
    shared.settings["lora_roots"] = str(roots)
    first = await shared.start(max_num_seqs=1)
    second = await shared.start(max_num_seqs=1)
    await until(lambda: first.gate._sharing._others and second.gate._sharing._others)
    return first, second


async def test_servers_on_one_store_load_and_unload_together(pair, roots):
    first, second = pair
    lora = await load(first, adapter(roots))
    await until(lambda: set(second.executor.adapters) == {lora.uid})
    assert (await loras(second))["style"].uid == lora.uid
    second.executor.gates[Lane.STEP].close()
    job = await second.create(sampling=using("style"))
    await until(lambda: any(job.job_id in plan.step for plan in second.executor.plans))
    # nobody uses it at the first, and the second lets its job end
    await unload(first)
    await until(lambda: bool(second.engine.adapters.book.faults))
    assert (await loras(second))["style"].state == UNLOADING
    again = await load(first, adapter(roots, "other.safetensors", 1))
    await until(lambda: again.uid in second.executor.adapters)
    assert lora.uid in second.executor.adapters
    assert (await second.finished()).step == 3 if second.engine.config.scheduler.max_num_seqs > 1 else True
    second.executor.gates[Lane.STEP].open()
    await second.watch(job.job_id)
    await until(lambda: set(second.executor.adapters) == {again.uid})
    assert len((await second.get(job.job_id)).effective.loras) == 1


async def test_of_two_servers_that_load_one_name_at_once_one_does(pair, roots):
    paths = [adapter(roots, f"{number}.safetensors", number) for number in range(2)]
    outcomes = await asyncio.gather(
        *(load(life, path) for life, path in zip(pair, paths, strict=True)), return_exceptions=True
    )
    loaded = [one for one in outcomes if not isinstance(one, BaseException)]
    assert len(loaded) == 1
    for life in pair:
        await until(lambda life=life: set(life.executor.adapters) == {loaded[0].uid})
