"""Features two by two, on one model of each family of blocks: each pair is what the two say of it together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_grpc.nn.activations import Activation, quantize
from omni_grpc.nn.linear import AnyLinear
from omni_grpc.types.lora import Lora
from omni_grpc.types.step_cache import CacheDraft
from omni_grpc.worker.reachable import movable, tensors
from tests.features.graphed import graphed, played, same_in_turns
from tests.features.suite import (
    CACHE,
    FAMILIES,
    FIRST,
    INT8,
    NEVER,
    OFFLOAD,
    SECOND,
    Suite,
    alone,
    company,
    denoisers,
    far,
    halfway,
    run,
    tea,
)
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.worker.host_device import PretendMemory

pytestmark = pytest.mark.conformance

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    name = FAMILIES[request.param]
    return Suite(ENTRIES[name], tmp_path_factory.mktemp(name))


def asked(model: Model) -> CacheDraft:
    return tea(halfway(model))


SETTINGS: Mapping[str, Callable[[Suite], Mapping[str, Any]]] = {
    "step cache": lambda suite: CACHE,
    "int8": lambda suite: INT8,
    "LoRA": lambda suite: suite.lora,
}


def beside(feature: str, *others: str, like: str, close: str) -> pytest.MarkDecorator:
    """Runs a test with each of the others, as a line of the table of pairs."""
    marks = {other: pytest.mark.shows(f"{other} x {feature}", like, close) for other in others}
    return pytest.mark.parametrize("other", [pytest.param(other, marks=mark) for other, mark in marks.items()])


@beside("step cache, threshold 0", "int8", "LoRA", like="without the cache", close="bit for bit")
def test_a_cache_that_may_never_reuse_changes_nothing_of_another_feature(suite: Suite, other: str) -> None:
    single, both = (suite.load(feature, SETTINGS[other](suite)) for feature in ({}, CACHE))
    without, never = run(single, *company(single)), run(both, *company(both, NEVER))
    assert all(torch.equal(never[name].latents, without[name].latents) for name in without)
    assert all(all(it.computed) for it in never.values())


@beside("step cache", "int8", "LoRA", like="each request alone", close="same decisions, 1e-5")
def test_a_cache_around_another_feature_decides_in_company_as_alone(suite: Suite, other: str) -> None:
    both = suite.load(CACHE, SETTINGS[other](suite))
    together = run(both, *company(both, asked(both)))
    for _, request in company(both, asked(both)):
        solo, mine = alone(both, request), together[request.id]
        assert solo.reused == mine.reused
        assert far(solo.latents, mine.latents) < TOLERANCE
        without = alone(both, dataclasses.replace(request, cache=None))
        assert any(mine.reused) == (far(mine.latents, without.latents) > 1e-4)
    assert any(any(mine.reused) for mine in together.values())


@pytest.mark.shows("LoRA x step cache", "of two adapters in a batch, each alone", "1e-5")
def test_a_cache_of_one_request_knows_nothing_of_the_adapters_of_another(suite: Suite) -> None:
    """The same prompt, seed and size with two adapters, in one batch under one cache."""
    model = suite.load(CACHE, suite.lora)
    requests = [
        model.request(model.draft(steps=5, cache=asked(model), loras=(Lora(lora_id=name),)), name)
        for name in (FIRST, SECOND)
    ]
    together = run(model, *((0, request) for request in requests))
    for request in requests:
        assert far(together[request.id].latents, alone(model, request).latents) < TOLERANCE
    assert far(together[FIRST].latents, together[SECOND].latents) > 1e-3


@beside("layerwise offload", *SETTINGS, like="without offload", close="bit for bit")
def test_offload_changes_nothing_of_another_feature(suite: Suite, other: str) -> None:
    feature = SETTINGS[other](suite)
    resident, offloaded = suite.load(feature), suite.load(feature, OFFLOAD)
    cache = asked(resident) if other == "step cache" else None
    expected, got = (run(model, *company(model, cache)) for model in (resident, offloaded))
    for name, one in expected.items():
        assert torch.equal(got[name].latents, one.latents)
        assert got[name].reused == one.reused
    assert other != "step cache" or any(any(one.reused) for one in got.values())


@beside("CPU offload and sleep", *SETTINGS, like="on the device all the time", close="bit for bit")
def test_weights_that_leave_change_nothing_of_another_feature(suite: Suite, other: str) -> None:
    feature = SETTINGS[other](suite)
    resident, leaving = suite.load(feature), suite.load(feature, memory=PretendMemory(), enable_cpu_offload=True)
    cache = asked(resident) if other == "step cache" else None
    expected = run(resident, *company(resident, cache))
    for _ in range(2):
        got = run(leaving, *company(leaving, cache))
        assert all(torch.equal(got[name].latents, one.latents) for name, one in expected.items())
        leaving.residency.sleep()
        # of the host's memory, adapters are in that of a mapped file
        assert not movable(tensors(leaving.components), leaving.device)
        leaving.residency.wake()
        # as the worker does, and they come with the requests that name them
        if leaving.residency.adapters is not None:
            leaving.residency.adapters.wake()


@beside("CUDA graphs", *SETTINGS, like="without graphs", close="bit for bit")
def test_graphs_change_nothing_of_another_feature(suite: Suite, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS[other](suite)
    plain = suite.load(settings)
    model, recorders = graphed(suite, monkeypatch, **settings)
    same_in_turns(plain, model, asked(plain) if other == "step cache" else None)
    assert played(recorders)


@pytest.mark.shows("LoRA x int8", "int8 plus the exact change, layer by layer", "1e-5")
@torch.inference_mode()
def test_adapters_over_int8_are_exact_on_a_base_in_int8(suite: Suite) -> None:
    """Layer by layer, since a rounding that falls to the other side in one layer is amplified by those after it."""
    loras = (Lora(lora_id=FIRST, scale=-0.5), Lora(lora_id=SECOND, scale=0.8))
    base, both = suite.load(INT8), suite.load(INT8, suite.lora)
    assert both.ready.found.quantized_layers == base.ready.found.quantized_layers
    checked: list[torch.dtype] = []
    hooks = []
    for component in suite.components:
        plain, changes = denoisers(base)[component], by_layer(suite, component, loras)
        for path, layer in denoisers(both)[component].named_modules():
            if path in changes:
                hooks.append(layer.register_forward_hook(compare(plain.get_submodule(path), changes[path], checked)))
    request = both.request(both.guided(steps=2, loras=loras))
    adapted = alone(both, request).latents
    for hook in hooks:
        hook.remove()
    assert checked.count(torch.int8) >= both.ready.found.quantized_layers["int8"]
    assert torch.float32 in checked
    assert far(adapted, alone(base, request).latents) > 1e-3


def by_layer(suite: Suite, component: str, loras: tuple[Lora, ...]) -> dict[str, AnyLinear]:
    """Layers of nothing but the change of each of ours, found by loading a checkpoint of nothing but changes."""
    changes = {name: torch.zeros_like(weight) for name, weight in suite.weights(component).items()}
    for lora in loras:
        for name, change in suite.changes(component)[lora.lora_id].items():
            changes[name] += lora.scale * change
    module = suite.load_weights(suite.load(), component, changes)
    return {path: part for path, part in module.named_modules() if isinstance(part, AnyLinear)}


def compare(base: AnyLinear, change: AnyLinear, checked: list[torch.dtype]) -> Callable[..., None]:
    """Holds each output of a layer against the same layer without adapters, plus the exact change."""

    def hook(layer: AnyLinear, inputs: tuple[Activation, ...], out: Tensor) -> None:
        (x,) = inputs
        if isinstance(x, Tensor) and base.activation_dtype is not None:
            x = quantize(x, base.activation_dtype)
        # adapters change what the layer reads
        read = x if isinstance(x, Tensor) else x.codes.float() * x.scale[:, None]
        expected = base(x) + change(read)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=TOLERANCE)
        checked.append(base.weight.dtype)

    return hook
