"""LoadLora, UnloadLora and ListLoras: what may be loaded from where, and what becomes of the jobs that use it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import Code, Failure
from omni_grpc.v1 import admin_pb2, artifact_pb2, model_pb2

from .service import Service, refusal, serving, until
from .test_audit import lines

LOADED, PENDING, LOADING, UNLOADING, FAILED = (
    getattr(model_pb2, f"LORA_STATE_{name}") for name in ("LOADED", "PENDING", "LOADING", "UNLOADING", "FAILED")
)
BAD = Failure(code=Code.INVALID_ARGUMENT, reason="BAD_LORA", message="its shapes are those of another model")


def content(
    seed: int = 0, keys: tuple[str, ...] = ("transformer.x.lora_A.weight", "transformer.x.lora_B.weight")
) -> bytes:
    """A safetensors file of one value for each key."""
    header: dict[str, Any] = {
        key: {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * i, 4 * i + 4]} for i, key in enumerate(keys)
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes([seed % 256] * (4 * len(keys)))


def adapter(folder: Path, name: str = "style.safetensors", seed: int = 0) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content(seed))
    return path


async def load(service: Service, source: Path | None = None, lora_id: str = "style", **fields) -> model_pb2.Lora:
    if source is not None:
        fields["path"] = str(source)
    request = admin_pb2.LoadLoraRequest(**{"lora_id": lora_id, "model": "toy", **fields})
    return (await service.admin.LoadLora(request)).lora


async def unload(service: Service, lora_id: str = "style", **fields) -> admin_pb2.UnloadLoraResponse:
    return await service.admin.UnloadLora(admin_pb2.UnloadLoraRequest(lora_id=lora_id, model="toy", **fields))


async def loras(service: Service) -> dict[str, model_pb2.Lora]:
    return {one.lora_id: one for one in (await service.models.ListLoras(model_pb2.ListLorasRequest())).loras}


def using(*names: str) -> dict[str, Any]:
    return {"steps": 3, "seed": 7, "loras": [{"lora_id": name} for name in names]}


@pytest.fixture
async def roots(tmp_path: Path) -> Path:
    folder = tmp_path / "loras"
    folder.mkdir()
    return folder


async def test_an_adapter_is_loaded_used_listed_and_unloaded(roots: Path) -> None:
    async with serving(lora_roots=str(roots)) as service:
        path = adapter(roots)
        error = await refusal(service.create(sampling=using("style")))
        assert (error.code, error.fields) == ("INVALID_ARGUMENT", ["sampling.loras.lora_id"])
        assert "load it with LoadLora" in error.message
        lora = await load(service, path, pinned=True)
        assert (lora.lora_id, lora.model, lora.source, lora.state) == ("style", "toy", str(path), LOADED)
        assert (lora.keys_applied, lora.rank, list(lora.targets), lora.pinned) == (2, 4, ["transformer"], True)
        assert lora.sha256 == hashlib.sha256(path.read_bytes()).digest()
        assert (lora.cache_bytes, lora.in_use) == (100, 0)
        assert lora.uid.startswith("style#")
        assert lora.load_time.seconds > 1e9
        assert await loras(service) == {"style": lora}
        job = await service.finished(sampling=using("style"))
        assert [one.lora_id for one in job.effective.loras] == ["style"]
        assert service.executor.plans[0].admit[0].loras[0].uid == lora.uid
        assert (await unload(service)).failed_jobs == 0
        assert service.executor.adapters == {}
        assert await loras(service) == {}
        assert (await refusal(service.create(sampling=using("style")))).code == "INVALID_ARGUMENT"
        error = await refusal(unload(service))
        assert (error.code, error.reason) == ("NOT_FOUND", "LORA_NOT_FOUND")


async def test_the_same_file_is_loaded_once_and_another_one_is_refused(roots: Path) -> None:
    async with serving(lora_roots=str(roots)) as service:
        first = await load(service, adapter(roots))
        assert await load(service, adapter(roots, "copy.safetensors")) == first
        other = adapter(roots, "other.safetensors", seed=1)
        error = await refusal(load(service, other))
        assert (error.code, error.reason) == ("ALREADY_EXISTS", "LORA_EXISTS")
        assert "style.safetensors" in error.message
        assert (await refusal(load(service, adapter(roots), pinned=True))).reason == "LORA_EXISTS"
        found = await asyncio.gather(*(load(service, other, "other") for _ in range(5)))
        assert len({lora.uid for lora in found}) == 1
        assert len(service.executor.adapters) == 2
        await unload(service)
        again = await load(service, other)
        assert again.uid != first.uid
        assert again.sha256 != first.sha256


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"lora_id": ""}, "lora_id"),
        ({"lora_id": "a/b"}, "lora_id"),
        ({"lora_id": "a" * 129}, "lora_id"),
        ({"model": ""}, "model"),
        ({"path": ""}, "source"),
        ({"sha256": b"short"}, "sha256"),
        ({"sha256": bytes(32)}, "sha256"),
        ({"format": "zip"}, "format"),
        ({"filename": "style.safetensors"}, "filename"),
        ({"path": "ROOTS"}, "filename"),
        ({"path": "ROOTS", "filename": "none.safetensors"}, "filename"),
        ({"path": "ROOTS", "filename": "pickled.bin"}, "filename"),
        ({"path": "ROOTS/pickled.bin"}, "path"),
        ({"path": "ROOTS/none.safetensors"}, "path"),
        ({"path": "ROOTS/text.safetensors"}, "source"),
        ({"path": "ROOTS/cut.safetensors"}, "source"),
        ({"path": "ROOTS/model.safetensors"}, "source"),
        ({"path": "\0"}, "path"),
    ],
)
async def test_what_cannot_be_loaded_is_refused_by_field(roots: Path, fields: dict[str, Any], field: str) -> None:
    adapter(roots)
    adapter(roots, "second.safetensors")
    (roots / "pickled.bin").write_bytes(b"no")
    (roots / "text.safetensors").write_text("this is no such file, whatever its name says")
    (roots / "cut.safetensors").write_bytes(content()[:-2])
    (roots / "model.safetensors").write_bytes(content(keys=("transformer.x.weight",)))
    given = {"path": str(roots / "style.safetensors")} | fields
    given["path"] = given["path"].replace("ROOTS", str(roots))
    async with serving(lora_roots=str(roots)) as service:
        error = await refusal(load(service, **given))
        assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field]), error.message
        assert await loras(service) == {}
        assert service.executor.orders == []


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "link.safetensors", "linked", "/etc/passwd", "style.safetensors"]
)
async def test_what_is_outside_of_the_roots_is_denied(roots: Path, name: str) -> None:
    secret = adapter(roots.parent, "secret.safetensors")
    adapter(roots)
    (roots / "link.safetensors").symlink_to(secret)
    (roots / "linked").mkdir()
    (roots / "linked" / "adapter_model.safetensors").symlink_to(secret)
    path = name if name == "style.safetensors" else str(roots / name)
    async with serving(lora_roots=str(roots)) as service:
        error = await refusal(load(service, path=path))
        assert (error.code, error.reason) == ("PERMISSION_DENIED", "PATH_NOT_ALLOWED")
        assert await loras(service) == {}
    async with serving() as service:
        error = await refusal(load(service, roots / "style.safetensors"))
        assert (error.code, error.reason) == ("PERMISSION_DENIED", "PATH_NOT_ALLOWED")
        error = await refusal(load(service, hub_id="org/style"))
        assert (error.code, error.reason, error.fields) == ("PERMISSION_DENIED", "HUB_NOT_ALLOWED", ["hub_id"])


async def test_of_a_folder_the_file_of_an_adapter_is_taken(roots: Path) -> None:
    adapter(roots / "peft", "adapter_model.safetensors")
    adapter(roots / "peft", "optimizer.safetensors", seed=2)
    async with serving(lora_roots=str(roots)) as service:
        lora = await load(service, roots / "peft")
        assert service.executor.adapters[lora.uid].file == str(roots / "peft" / "adapter_model.safetensors")
        named = await load(service, roots / "peft", "named", filename="optimizer.safetensors")
        assert named.sha256 == hashlib.sha256(content(2)).digest()
        assert named.source == f"{roots / 'peft'}/optimizer.safetensors"


async def test_an_upload_is_loaded_and_stays_as_long(roots: Path) -> None:
    async with serving(asset_retention=1) as service:
        header = artifact_pb2.UploadHeader(mime_type="application/octet-stream", size_bytes=len(content()))
        messages = [
            artifact_pb2.UploadAssetRequest(header=header),
            artifact_pb2.UploadAssetRequest(data=content()),
        ]
        asset_id = (await service.artifacts.UploadAsset(iter(messages))).asset_id
        lora = await load(service, asset_id=asset_id)
        assert (lora.source, lora.state) == (asset_id, LOADED)
        copy = Path(service.executor.adapters[lora.uid].file)
        assert copy.read_bytes() == content()  # noqa: ASYNC240
        delete = artifact_pb2.DeleteArtifactRequest(artifact_id=asset_id)
        error = await refusal(service.artifacts.DeleteArtifact(delete))
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", "ASSET_IN_USE")
        await asyncio.sleep(1.1)
        await service.engine.assets.sweep()
        assert (await load(service, lora_id="second", asset_id=asset_id)).state == LOADED
        await unload(service)
        assert copy.is_file(), "the second one needs it"  # noqa: ASYNC240
        await unload(service, "second")
        assert not copy.exists()  # noqa: ASYNC240
        await service.artifacts.DeleteArtifact(delete)
        assert (await refusal(load(service, asset_id=asset_id))).reason == "ASSET_NOT_FOUND"


async def test_what_a_worker_cannot_load_is_told_and_nothing_is_left(roots: Path) -> None:
    async with serving(lora_roots=str(roots)) as service:
        service.executor.unloadable["style"] = BAD
        error = await refusal(load(service, adapter(roots)))
        assert (error.code, error.reason, error.message) == ("INVALID_ARGUMENT", "BAD_LORA", BAD.message)
        assert await loras(service) == {}
        service.executor.unloadable.clear()
        assert (await load(service, adapter(roots))).state == LOADED


async def test_while_it_is_being_loaded_jobs_go_on_and_cannot_name_it(roots: Path) -> None:
    async with serving(lora_roots=str(roots)) as service:
        service.executor.adapting.close()
        loading = asyncio.ensure_future(load(service, adapter(roots)))
        await until(lambda: any(service.engine.adapters.book))
        assert (await loras(service))["style"].state == LOADING
        error = await refusal(service.create(sampling=using("style")))
        assert "is still being loaded" in error.message
        assert (await refusal(unload(service, force=True))).reason == "LORA_LOADING"
        assert (await service.finished()).step == 3
        # its caller leaves, and it goes on
        loading.cancel()
        service.executor.adapting.open()
        await until(lambda: len(service.executor.adapters) == 1)
        assert (await load(service, adapter(roots))).state == LOADED


async def test_what_jobs_use_is_not_unloaded_unless_they_end(roots: Path) -> None:
    async with serving(lora_roots=str(roots)) as service:
        await load(service, adapter(roots))
        service.executor.gates[Lane.STEP].close()
        job = await service.create(sampling=using("style"))
        other = await service.create()
        error = await refusal(unload(service))
        assert (error.code, error.reason, error.metadata["jobs"]) == ("FAILED_PRECONDITION", "LORA_IN_USE", "1")
        assert (await loras(service))["style"].in_use == 1
        error = await refusal(unload(service, wait={"nanos": 50_000_000}))
        assert error.reason == "LORA_IN_USE"
        assert (await loras(service))["style"].state == LOADED, "it can be used again"
        waiting = asyncio.ensure_future(unload(service, wait={"seconds": 60}))
        await until(lambda: bool(service.engine.adapters.book.faults))
        assert (await loras(service))["style"].state == UNLOADING
        error = await refusal(service.create(sampling=using("style")))
        assert "is being unloaded" in error.message
        assert (await refusal(load(service, adapter(roots)))).reason == "LORA_UNLOADING"
        # somebody else is in a hurry
        assert (await unload(service, force=True)).failed_jobs == 1
        assert (await waiting).failed_jobs == 0
        ended = await service.get(job.job_id)
        assert ended.error.message.startswith("adapter 'style' was unloaded")
        service.executor.gates[Lane.STEP].open()
        await service.watch(other.job_id)
        assert (await service.get(other.job_id)).step == 3


async def test_waiting_ends_with_the_last_job(roots: Path) -> None:
    async with serving(lora_roots=str(roots), max_num_seqs=1) as service:
        await load(service, adapter(roots))
        service.executor.gates[Lane.STEP].close()
        jobs = [await service.create(sampling=using("style")) for _ in range(3)]
        waiting = asyncio.ensure_future(unload(service, wait={"seconds": 60}))
        await until(lambda: bool(service.engine.adapters.book.faults))
        service.executor.gates[Lane.STEP].open()
        assert (await waiting).failed_jobs == 0
        ended = [await service.get(job.job_id) for job in jobs]
        assert [job.step for job in ended] == [3, 3, 3]
        assert [len(job.effective.loras) for job in ended] == [1, 1, 1]


async def test_a_worker_that_is_started_anew_has_all_adapters_before_its_first_job(roots: Path) -> None:
    async with serving(lora_roots=str(roots)) as service:
        first = await load(service, adapter(roots))
        second = await load(service, adapter(roots, "second.safetensors", 1), "second")
        service.executor.adapting.close()
        await service.executor.die()
        assert (await loras(service))["style"].state in (PENDING, LOADING)
        job = await service.create(sampling=using("style", "second"))
        await until(lambda: service.executor.starts == 2)
        service.executor.adapting.let(1)
        await until(lambda: len(service.executor.adapters) == 1)
        assert not service.engine.replicas[0].open
        assert (await service.get(job.job_id)).step == 0
        service.executor.adapting.open()
        await service.watch(job.job_id)
        assert set(service.executor.adapters) == {first.uid, second.uid}
        assert len((await service.get(job.job_id)).effective.loras) == 2


async def test_what_cannot_be_loaded_again_is_told_and_takes_its_jobs_along(roots: Path) -> None:
    async with serving(lora_roots=str(roots)) as service:
        await load(service, adapter(roots))
        service.executor.unloadable["style"] = BAD
        service.executor.loading.close()
        await service.executor.die()
        lost = await service.create(sampling=using("style"))
        kept = await service.create()
        service.executor.loading.open()
        await service.watch(kept.job_id)
        assert (await service.get(kept.job_id)).step == 3
        failed = await service.get(lost.job_id)
        assert failed.error.message == f"adapter 'style' could not be loaded again: {BAD.message}"
        lora = (await loras(service))["style"]
        assert (lora.state, lora.error.message) == (FAILED, BAD.message)
        error = await refusal(service.create(sampling=using("style")))
        assert BAD.message in error.message
        service.executor.unloadable.clear()
        assert (await load(service, adapter(roots))).state == LOADED


async def test_an_adapter_that_kills_its_worker_is_given_up(roots: Path) -> None:
    async with serving(lora_roots=str(roots)) as service:
        service.executor.adapting.close()
        loading = asyncio.ensure_future(refusal(load(service, adapter(roots))))
        await until(lambda: len(service.executor.orders) == 1)
        await service.executor.die()
        error = await loading
        assert (error.code, error.reason) == ("UNAVAILABLE", "WORKER_DIED")
        service.executor.adapting.open()
        await until(lambda: service.engine.replicas[0].open)
        await load(service, adapter(roots))
        service.executor.adapting.close()
        await service.executor.die()
        for starts in (3, 4):
            await until(lambda n=starts: service.executor.starts == n and len(service.executor._tasks) == 1)
            await service.executor.die()
        await until(lambda: service.engine.replicas[0].open)
        lora = (await loras(service))["style"]
        assert (lora.state, lora.error.message) == (FAILED, "2 workers died while they loaded it")


async def test_a_model_that_sleeps_gets_its_adapters_when_it_wakes(roots: Path) -> None:
    async with serving(lora_roots=str(roots)) as service:
        await load(service, adapter(roots))
        await service.admin.Sleep(admin_pb2.SleepRequest(model="toy"))
        second = await load(service, adapter(roots, "second.safetensors", 1), "second")
        assert second.state == PENDING
        await unload(service)
        await service.admin.Wake(admin_pb2.WakeRequest(model="toy"))
        await until(lambda: set(service.executor.adapters) == {second.uid})
        assert (await loras(service))["second"].state == LOADED
        job = await service.finished(sampling=using("second"))
        assert len(job.effective.loras) == 1


async def test_the_audit_log_says_who_loaded_and_unloaded_what(roots: Path, tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    async with serving(lora_roots=str(roots), audit_log=str(log)) as service:
        await load(service, adapter(roots))
        await refusal(load(service, roots / "none.safetensors", "none"))
        await refusal(load(service, roots.parent, "../../etc"))
        await unload(service, force=True)
    told = [line for line in lines(log) if line["action"] in ("LoadLora", "UnloadLora")]
    assert [(line["action"], line["outcome"], line.get("adapter")) for line in told] == [
        ("LoadLora", "OK", "style"),
        ("LoadLora", "INVALID_ARGUMENT", "none"),
        ("LoadLora", "INVALID_ARGUMENT", None),
        ("UnloadLora", "OK", "style"),
    ]
    assert (told[0]["source"], told[0]["model"]) == ("path", "toy")
    assert str(roots) not in log.read_text()
