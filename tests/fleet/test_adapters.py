"""Adapters of models with several replicas, and of models that are not loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from omni_grpc.types.errors import Code, Failure
from omni_grpc.v1 import admin_pb2
from tests.fleet.several import serving_several
from tests.server.service import refusal, until
from tests.server.test_loras import LOADED, PENDING, adapter, load, loras, unload, using

BAD = Failure(code=Code.RESOURCE_EXHAUSTED, reason="ADAPTER_CACHE_FULL", message="the device has no room for it")


async def test_every_replica_loads_it_or_none_keeps_it(tmp_path: Path) -> None:
    async with serving_several("toy", data_parallel_size=2, lora_roots=str(tmp_path)) as service:
        one, two = service.workers["toy"]
        await until(lambda: all(replica.open for replica in service.engine.replicas))
        two.unloadable["style"] = BAD
        error = await refusal(load(service, adapter(tmp_path)))
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "ADAPTER_CACHE_FULL")
        await until(lambda: not one.adapters)
        two.unloadable.clear()
        two.adapting.close()
        loading = asyncio.ensure_future(load(service, adapter(tmp_path)))
        await until(lambda: len(one.adapters) == 1)
        assert not loading.done()
        two.adapting.open()
        lora = await loading
        assert set(one.adapters) == set(two.adapters) == {lora.uid}
        # one that dies loads it again, while the other one takes jobs with it
        two.adapting.close()
        await two.die()
        await until(lambda: two.starts == 2)
        assert (await loras(service))["style"].state in (LOADED, PENDING, 3)
        jobs = [await service.finished(sampling=using("style")) for _ in range(2)]
        assert [len(job.effective.loras) for job in jobs] == [1, 1]
        assert not service.engine.replicas[1].open
        two.adapting.open()
        await until(lambda: service.engine.replicas[1].open)
        assert set(two.adapters) == {lora.uid}
        await unload(service)
        assert one.adapters == two.adapters == {}


async def test_a_model_that_is_loaded_later_has_its_adapters_from_the_start(tmp_path: Path) -> None:
    async with serving_several("first", "toy", lora_roots=str(tmp_path)) as service:
        await load(service, adapter(tmp_path))
        await service.admin.UnloadModel(admin_pb2.UnloadModelRequest(model="toy"))
        second = await load(service, adapter(tmp_path, "second.safetensors", 1), "second")
        assert second.state == PENDING
        found = await loras(service)
        assert {name: lora.state for name, lora in found.items()} == {"style": PENDING, "second": PENDING}
        assert {lora.model for lora in found.values()} == {"toy"}
        await unload(service)
        async for _ in service.admin.LoadModel(admin_pb2.LoadModelRequest(model="toy")):
            pass
        assert set(service.workers["toy"][0].adapters) == {second.uid}
        assert service.workers["first"][0].adapters == {}
        error = await refusal(service.create(model="first", sampling=using("second")))
        assert error.fields == ["sampling.loras.lora_id"]


@pytest.mark.parametrize("fields", [{"model": "other"}])
async def test_a_model_that_is_not_there(tmp_path: Path, fields: dict[str, str]) -> None:
    async with serving_several("toy", lora_roots=str(tmp_path)) as service:
        assert (await refusal(load(service, adapter(tmp_path), **fields))).reason == "MODEL_NOT_FOUND"
