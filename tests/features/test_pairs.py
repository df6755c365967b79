"""Features two by two, on one model of each family of blocks: each pair is what the two say of it together."""

from __future__ import annotations

import pytest
import torch

from omni_grpc.nn.linear import AnyLinear
from omni_grpc.tuning import CacheDraft, Lora
from tests.features.suite import CACHE, FIRST, INT8, NEVER, OFFLOAD, SECOND, Suite, alone, company, far, halfway, run
from tests.models.cases import ENTRIES
from tests.models.model import Model

pytestmark = pytest.mark.conformance

TOLERANCE = 1e-5

FAMILIES = {"dual stream": "QwenImagePipeline"}
"""Family of blocks -> the model that stands for it."""


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    name = FAMILIES[request.param]
    return Suite(ENTRIES[name], tmp_path_factory.mktemp(name))


def asked(model: Model) -> CacheDraft:
    return CacheDraft(threshold=halfway(model))


@pytest.mark.parametrize("other", ["int8", "lora"])
def test_a_cache_around_another_feature_decides_as_alone_and_never_reusing_is_that_feature(
    suite: Suite, other: str
) -> None:
    feature = {"int8": INT8, "lora": suite.lora}[other]
    single, both = suite.load(feature), suite.load(CACHE, feature)
    without, never = run(single, *company(single)), run(both, *company(both, NEVER))
    assert all(torch.equal(never[name].latents, without[name].latents) for name in without)
    cached = run(both, *company(both, asked(both)))
    for _, request in company(both, asked(both)):
        solo, mine = alone(both, request), cached[request.id]
        assert solo.reused == mine.reused
        assert far(solo.latents, mine.latents) < TOLERANCE
        assert any(mine.reused)
        assert far(mine.latents, without[request.id].latents) > 1e-4


def test_a_cache_of_one_request_knows_nothing_of_the_adapters_of_another(suite: Suite) -> None:
    """The same prompt, seed and size with two adapters, in one batch under one cache."""
    model = suite.load(CACHE, suite.lora)
    requests = [
        model.request(model.draft(steps=5, cache=asked(model), loras=(Lora(id=name),)), name)
        for name in (FIRST, SECOND)
    ]
    together = run(model, *((0, request) for request in requests))
    for request in requests:
        assert far(together[request.id].latents, alone(model, request).latents) < TOLERANCE
    assert far(together[FIRST].latents, together[SECOND].latents) > 1e-3


@pytest.mark.parametrize("other", ["cache", "int8", "lora"])
def test_offload_changes_nothing_of_another_feature(suite: Suite, other: str) -> None:
    feature = {"cache": CACHE, "int8": INT8, "lora": suite.lora}[other]
    resident, offloaded = suite.load(feature), suite.load(feature, OFFLOAD)
    cache = asked(resident) if other == "cache" else None
    expected, got = (run(model, *company(model, cache)) for model in (resident, offloaded))
    for name, one in expected.items():
        assert torch.equal(got[name].latents, one.latents)
        assert got[name].reused == one.reused
    assert other != "cache" or any(any(one.reused) for one in got.values())


def test_adapters_over_int8_are_exact_on_a_base_in_int8(suite: Suite) -> None:
    """The reference adds the change of the merged weights, in float32, to what each int8 layer gives."""
    base, both = suite.load(INT8), suite.load(INT8, suite.lora)
    assert both.ready.quantized_layers == base.ready.quantized_layers
    for loras in ((Lora(id=FIRST),), (Lora(id=FIRST, scale=-0.5), Lora(id=SECOND, scale=0.8))):
        request = both.request(both.guided(steps=3, loras=loras))
        hooks = []
        for component in suite.components:
            denoiser = getattr(base.pipeline, component)
            for path, change in by_layer(suite, component, loras).items():
                hooks.append(denoiser.get_submodule(path).register_forward_hook(adding(change)))
        expected = alone(base, request).latents
        for hook in hooks:
            hook.remove()
        assert far(alone(both, request).latents, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))
        assert far(alone(base, base.request(base.guided(steps=3))).latents, expected) > 1e-3


def by_layer(suite: Suite, component: str, loras: tuple[Lora, ...]) -> dict[str, torch.Tensor]:
    """The change of each of our layers [out, in], found by loading a checkpoint of nothing but changes."""
    plain = suite.load()
    changes = {name: torch.zeros_like(weight) for name, weight in suite.weights(component).items()}
    for lora in loras:
        for name, change in suite.changes(component)[lora.id].items():
            changes[name] += lora.scale * change
    module = suite.load_weights(plain, component, changes)
    return {path: part.weight for path, part in module.named_modules() if isinstance(part, AnyLinear)}


def adding(change: torch.Tensor):
    def hook(layer: AnyLinear, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return out + inputs[0] @ change.T

    return hook
