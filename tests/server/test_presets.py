"""Presets over the wire: how they are listed, and what a reply says."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.gate.tenants import TenantLimits, Tenants
from omni_grpc.store.open import open_storage
from omni_grpc.types.lora import Lora
from omni_grpc.types.preset import Preset, PresetLora
from omni_grpc.types.request import GuidanceDraft
from omni_grpc.types.results import Effective
from omni_grpc.v1 import model_pb2
from omni_grpc.wire import from_message

from .fake_executor import FakeExecutor
from .service import CHECKPOINT, Service, image, refusal, served
from .test_features import WITH_LORAS

FAST = Preset(
    name="fast",
    title="Fast, 3 steps",
    source="https://example.com/fast",
    pipelines=("ToyPipeline",),
    steps=3,
    guidance=GuidanceDraft(true_cfg_scale=1.0),
    loras=(PresetLora(lora=Lora(lora_id="style", scale=0.125, target="transformer")),),
)
MISSING = dataclasses.replace(
    FAST, name="missing", scheduler_config={}, loras=(PresetLora(lora=Lora(lora_id="elsewhere")),)
)
LEVELS = dataclasses.replace(FAST, name="levels", loras=(), sigmas=(1.0, 0.5, 0.25), shift=5.0)


@asynccontextmanager
async def serving(recipe: str = "", **settings: Any) -> AsyncIterator[Service]:
    config = EngineConfig.from_settings(**({"model": "toy", "port": 0, "restart_backoff": 0} | settings))
    checkpoint = dataclasses.replace(CHECKPOINT, presets=(FAST, LEVELS, MISSING), recipe=recipe)
    executor = FakeExecutor(WITH_LORAS)
    async with served(config, Engine(config, checkpoint, executor, open_storage(config)), executor) as service:
        yield service


async def model(service: Service) -> model_pb2.Model:
    return (await service.models.GetModel(model_pb2.GetModelRequest(model="toy"))).model


async def test_a_model_lists_its_presets_with_what_they_set_and_whether_they_can_be_used() -> None:
    async with serving() as service:
        found = await model(service)
        (listed,) = (await service.models.ListModels(model_pb2.ListModelsRequest())).models
    assert list(listed.presets) == list(found.presets)
    fast, levels, missing = found.presets
    assert (fast.name, fast.title, fast.source) == ("fast", "Fast, 3 steps", "https://example.com/fast")
    assert (fast.is_default, fast.unusable) == (False, "")
    assert (fast.sampling.steps, fast.sampling.guidance.true_cfg_scale) == (3, 1.0)
    assert not fast.sampling.guidance.HasField("scale")
    assert not fast.sampling.HasField("shift")
    assert [(lora.lora_id, lora.scale, lora.target) for lora in fast.sampling.loras] == [
        ("style", 0.125, "transformer")
    ]
    assert (list(levels.sampling.sigmas), levels.sampling.shift) == ([1.0, 0.5, 0.25], 5.0)
    assert "the schedule of" in levels.unusable
    assert "needs the LoRA adapter elsewhere, not loaded here" in missing.unusable
    assert found.defaults.steps == CHECKPOINT.defaults.steps
    assert not found.defaults.preset


async def test_a_recipe_is_the_default_that_is_listed() -> None:
    async with serving("fast") as service:
        found = await model(service)
    assert [preset.name for preset in found.presets if preset.is_default] == ["fast"]
    assert (found.defaults.preset, found.defaults.steps, found.defaults.guidance.true_cfg_scale) == ("fast", 3, 1.0)
    assert [lora.lora_id for lora in found.defaults.loras] == ["style"]


async def test_a_reply_says_what_a_preset_made_of_the_request() -> None:
    async with serving() as service:
        job = await service.finished(sampling={"preset": "fast"})
        other = await service.finished(sampling={"preset": "fast", "steps": 5})
        plain = await service.finished()
    effective = from_message(Effective, job.effective)
    assert (effective.preset, effective.steps) == ("fast", 3)
    assert [(lora.lora_id, lora.scale, lora.target) for lora in effective.loras] == [("style", 0.125, "transformer")]
    assert job.effective.defaults_used["sampling.guidance.true_cfg_scale"] == "1.0"
    (warning,) = other.warnings
    assert (warning.code, warning.field, warning.requested) == ("PRESET_OVERRIDDEN", "sampling.steps", "5")
    assert other.effective.steps == 5
    assert plain.effective.preset == ""


@pytest.mark.parametrize(
    ("sampling", "field", "message"),
    [
        (
            {"preset": "slow"},
            "sampling.preset",
            "has no preset 'slow'; it has fast; levels, missing cannot be used now",
        ),
        ({"preset": "missing"}, "sampling.preset", "'missing' needs the LoRA adapter elsewhere, not loaded here"),
        ({"sigmas": [1.0, 0.5]}, "sampling.sigmas", "the schedule of"),
        ({"shift": 3.0}, "sampling.shift", "the schedule of"),
    ],
)
async def test_what_cannot_be_used_is_refused_by_field(sampling: dict[str, Any], field: str, message: str) -> None:
    async with serving() as service:
        error = await refusal(service.generation.GenerateImage(image(sampling=sampling)))
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field])
    assert message in error.message


async def test_a_preset_brings_no_adapter_that_its_tenant_may_not_use() -> None:
    async with serving() as service:
        quotas = service.server._gate._quotas
        quotas._tenants = Tenants(default=TenantLimits(loras=("mine",)))
        error = await refusal(service.generation.GenerateImage(image(sampling={"preset": "fast"})))
    assert (error.code, error.reason) == ("PERMISSION_DENIED", "LORA_NOT_ALLOWED")
