"""A diffusers pipeline that sleeps, with the hooks of its own offload and without, the host in the device's part."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from omni_grpc.types.lora import Lora
from omni_grpc.worker.reachable import tensors
from omni_grpc.worker.residency import Residency
from tests.worker.host_device import PretendMemory

from . import lora_files
from .conftest import Adapter, equal

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "seeds": (1,)}


def held(adapter: Adapter) -> int:
    found = tensors(adapter.loaded.components)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())


@pytest.mark.parametrize("settings", [{}, {"enable_layerwise_offload": True}], ids=["plain", "offloaded"])
@pytest.mark.parametrize("name", ["flux", "stable_diffusion"])
def test_a_pipeline_that_slept_makes_the_same(
    name: str, settings: dict[str, Any], load: Callable[..., Adapter]
) -> None:
    adapter = load(name, **settings)
    assert Residency(adapter.loaded, CPU).device_bytes >= adapter.loaded.weight_bytes
    for tensor in list(tensors(adapter.loaded.components)):
        # as on a device, which maps no file
        tensor.data = tensor.data.clone()
    expected = adapter.run(**SMALL).output
    memory = PretendMemory(lambda: held(adapter))
    residency = Residency(adapter.loaded, CPU, memory, host_free=lambda: 1 << 40)
    assert residency.device_bytes >= adapter.loaded.weight_bytes
    for _ in range(2):
        assert residency.sleep() > 0
        assert (residency.device_bytes, held(adapter)) == (0, 0)
        residency.wake()
        assert equal(adapter.run(**SMALL).output, expected)


def test_adapters_sleep_with_the_modules_that_they_change(
    load: Callable[..., Adapter], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline = DiffusionPipeline.from_pretrained(tiny("flux"), local_files_only=True)
    file = lora_files.save(lora_files.peft(pipeline, {"transformer": ("to_q",)}, seed=1), tmp_path / "a.safetensors")
    adapter = load("flux", lora={"a": str(file)})
    for tensor in list(tensors(adapter.loaded.components)):
        tensor.data = tensor.data.clone()
    asked = {"loras": (Lora(lora_id="a"),), **SMALL}
    expected, plain = adapter.run(**asked).output, adapter.run(**SMALL).output
    assert not equal(expected, plain)
    memory = PretendMemory(lambda: held(adapter))
    residency = Residency(adapter.loaded, CPU, memory, host_free=lambda: 1 << 40)
    for _ in range(2):
        assert residency.sleep() > 0
        assert (residency.device_bytes, held(adapter)) == (0, 0)
        residency.wake()
        assert equal(adapter.run(**asked).output, expected)
        assert equal(adapter.run(**SMALL).output, plain)


def test_a_pipeline_that_was_dropped_is_garbage(load: Callable[..., Adapter]) -> None:
    adapter = load("flux", enable_layerwise_offload=True)
    adapter.run(**SMALL)
    weights = [weakref.ref(parameter) for parameter in adapter.pipeline.transformer.parameters()]
    residency = Residency(adapter.loaded, CPU)
    whole = residency.device_bytes
    residency.begin_drop()
    del adapter
    assert residency.end_drop() >= whole
    assert not any(weight() is not None for weight in weights)
