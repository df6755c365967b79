"""Limits of tenants, on a real server: each is refused by name, and whoever obeys the time in RetryInfo succeeds."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grpc import aio

from omni_grpc.engine import Submission
from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import PermissionDenied
from omni_grpc.types.lora import Lora
from omni_grpc.types.request import Draft
from omni_grpc.v1 import artifact_pb2, job_pb2, model_pb2

from .service import Refusal, Service, image, read_refusal, serving

pytestmark = pytest.mark.service

WORK = 32 * 16 * 3
"""Pixel-steps of `image()`, which has nothing to guide away from."""


def token(tenant: str) -> str:
    return "omni_" + hashlib.sha256(tenant.encode()).hexdigest()[:43]


@contextlib.asynccontextmanager
async def limited(folder: Path, limits: dict[str, Any], **settings: Any) -> AsyncIterator[Service]:
    records = [
        {
            "name": tenant,
            "tenant": tenant,
            "scopes": ["generate", "read"],
            "sha256": hashlib.sha256(token(tenant).encode()).hexdigest(),
        }
        for tenant in ("a", "b")
    ]
    callers, file = folder / "callers.yaml", folder / "limits.yaml"
    callers.write_text(yaml.safe_dump(records))
    callers.chmod(0o600)
    file.write_text(yaml.safe_dump(limits))
    async with serving(token_file=str(callers), tenant_limits=str(file), **settings) as service:
        yield service


async def create(service: Service, tenant: str = "a", **changes: Any) -> job_pb2.Job | Refusal:
    request = job_pb2.CreateJobRequest(generate_image=image(**changes))
    try:
        made = await service.jobs.CreateJob(request, metadata=(("authorization", f"Bearer {token(tenant)}"),))
    except aio.AioRpcError as error:
        return read_refusal(error)
    return made.job


def wait_of(refusal: Any) -> float:
    assert isinstance(refusal, Refusal), refusal
    delay = refusal.details["RetryInfo"].retry_delay
    return float(delay.seconds + delay.nanos / 1e9)


@pytest.mark.parametrize(
    ("limits", "changes", "code", "reason", "field"),
    [
        ({"max_steps": 2}, {}, "INVALID_ARGUMENT", "TENANT_LIMIT", "sampling.steps"),
        ({"max_pixels": 511}, {}, "INVALID_ARGUMENT", "TENANT_LIMIT", "width, height"),
        ({"max_priority": 5}, {"options": {"priority": 6}}, "INVALID_ARGUMENT", "TENANT_LIMIT", "options.priority"),
        ({"models": ["other"]}, {}, "PERMISSION_DENIED", "MODEL_NOT_ALLOWED", None),
        ({"models": ["other"]}, {"model": ""}, "PERMISSION_DENIED", "MODEL_NOT_ALLOWED", None),
        ({"max_queued": 0}, {}, "RESOURCE_EXHAUSTED", "TENANT_QUEUE_FULL", None),
        ({"jobs_per_minute": 0.5}, {}, "RESOURCE_EXHAUSTED", "TENANT_RATE_TOO_LOW", None),
        ({"pixel_steps_per_minute": 10}, {}, "RESOURCE_EXHAUSTED", "TENANT_RATE_TOO_LOW", None),
        ({"stored_bytes": 0}, {}, "RESOURCE_EXHAUSTED", "TENANT_STORAGE_FULL", None),
        ({"input_bytes": 0}, {}, "RESOURCE_EXHAUSTED", "TENANT_INPUTS_FULL", None),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
async def test_a_limit_is_refused_by_name_and_for_its_tenant_alone(
    tmp_path: Path, limits: dict[str, Any], changes: dict[str, Any], code: str, reason: str, field: str | None
) -> None:
    async with limited(tmp_path, {"tenants": {"a": limits}}) as service:
        refused = await create(service, **changes)
        assert isinstance(refused, Refusal), refused
        assert (refused.code, refused.reason) == (code, reason)
        if field is not None:
            assert refused.fields == [field]
        assert "RetryInfo" not in refused.details
        other = await create(service, "b", **changes)
        assert isinstance(other, job_pb2.Job), other
        assert len(service.engine.jobs) == 1


async def test_whoever_obeys_the_rate_succeeds(tmp_path: Path) -> None:
    limits = {"tenants": {"a": {"pixel_steps_per_minute": 200.0 * WORK}, "b": {"jobs_per_minute": 180}}}
    async with limited(tmp_path, limits) as service:
        for tenant, burst in (("a", 200), ("b", 180)):
            for _ in range(3 * burst):
                refused = await create(service, tenant)
                if isinstance(refused, Refusal):
                    break
            assert refused.reason == "TENANT_RATE"
            for _ in range(3):
                await asyncio.sleep(wait_of(refused))
                assert isinstance(await create(service, tenant), job_pb2.Job)
                refused = await create(service, tenant)


async def test_a_full_queue_says_when_there_is_room(tmp_path: Path) -> None:
    async with limited(tmp_path, {"tenants": {"a": {"max_queued": 1, "max_running": 1}}}) as service:
        service.executor.gates[Lane.STEP].close()
        made = [await create(service) for _ in range(2)]
        assert all(isinstance(job, job_pb2.Job) for job in made)
        refused = await create(service)
        assert isinstance(refused, Refusal)
        assert (refused.reason, wait_of(refused) > 0) == ("TENANT_QUEUE_FULL", True)
        # max_running holds up its own tenant alone
        assert isinstance(await create(service, "b"), job_pb2.Job)
        service.executor.gates[Lane.STEP].open()
        await asyncio.sleep(wait_of(refused))
        assert isinstance(await create(service), job_pb2.Job)


async def test_a_refused_or_repeated_request_costs_nothing(tmp_path: Path) -> None:
    async with limited(tmp_path, {"default": {"jobs_per_minute": 2}}) as service:
        bad = await create(service, width=33)
        assert isinstance(bad, Refusal)
        first = await create(service, options={"request_id": "r"})
        again = await create(service, options={"request_id": "r"})
        assert isinstance(first, job_pb2.Job)
        assert first.job_id == again.job_id
        assert isinstance(await create(service), job_pb2.Job)
        refused = await create(service)
        assert isinstance(refused, Refusal)
        assert refused.reason == "TENANT_RATE"
        assert (await create(service, options={"request_id": "r"})).job_id == first.job_id


async def test_uploads_and_outputs_count_together(tmp_path: Path) -> None:
    async with limited(tmp_path, {"default": {"stored_bytes": 1000}}) as service:
        header = artifact_pb2.UploadHeader(mime_type="image/png", size_bytes=1001)
        with pytest.raises(aio.AioRpcError) as caught:
            await service.artifacts.UploadAsset(
                iter([artifact_pb2.UploadAssetRequest(header=header)]),
                metadata=(("authorization", f"Bearer {token('a')}"),),
            )
        assert read_refusal(caught.value).reason == "TENANT_STORAGE_FULL"


async def test_a_model_that_a_tenant_may_not_use_is_not_listed(tmp_path: Path) -> None:
    async with limited(tmp_path, {"tenants": {"a": {"models": []}}}) as service:
        for tenant, count in (("a", 0), ("b", 1)):
            metadata = (("authorization", f"Bearer {token(tenant)}"),)
            found = await service.models.ListModels(model_pb2.ListModelsRequest(), metadata=metadata)
            assert len(found.models) == count
            for call in (
                service.models.GetModel(model_pb2.GetModelRequest(), metadata=metadata),
                service.models.ListLoras(model_pb2.ListLorasRequest(), metadata=metadata),
            ):
                if count:
                    await call
                    continue
                with pytest.raises(aio.AioRpcError) as caught:
                    await call
                assert read_refusal(caught.value).reason == "MODEL_NOT_ALLOWED"


async def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    async with limited(tmp_path, {"default": {"max_steps": 2}}) as service:
        assert isinstance(await create(service), Refusal)
        replaced = tmp_path / "new.yaml"
        for text, fits in (("default: {max_steps: 3}", True), ("default: {max_stepz: 1}", True)):
            replaced.write_text(text)
            os.replace(replaced, tmp_path / "limits.yaml")
            await asyncio.sleep(1.1)
            assert isinstance(await create(service), job_pb2.Job) is fits


async def test_weights_reach_the_scheduler(tmp_path: Path) -> None:
    async with limited(tmp_path, {"tenants": {"a": {"weight": 3, "max_running": 4}}}) as service:
        share = service.engine.replicas[0].scheduler.share_of
        assert (share("a").weight, share("a").max_running, share("b").weight) == (3.0, 4, 1.0)


async def test_an_adapter_that_a_tenant_may_not_use_is_refused(tmp_path: Path) -> None:
    async with limited(tmp_path, {"tenants": {"a": {"loras": ["mine"]}}}) as service:
        quotas = service.server._gate._quotas
        for name, allowed in (("mine", True), ("theirs", False)):
            draft = Draft(model="toy", prompt="x", loras=(Lora(lora_id=name, scale=1.0),))
            refusing = (
                contextlib.nullcontext() if allowed else pytest.raises(PermissionDenied, match="theirs is not for")
            )
            with refusing:
                quotas.check(Submission(draft=draft, tenant="a"))
            quotas.check(Submission(draft=draft, tenant="b"))
