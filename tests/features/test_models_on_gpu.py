"""Features of whole models on CUDA, as a worker loads them. Needs diffusers, for the tiny checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from omni_grpc.features.cuda_graphs import Graphs
from tests.features.graphed import same_in_turns
from tests.features.suite import CACHE, FAMILIES, INT8, Suite, company, halfway, run, stacks, tea
from tests.models.cases import ENTRIES
from tests.models.model import Model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


INNER_STEPS_FP16 = {
    "diffusion_attention_config": {"schedule": [{"steps": [0.2, 0.8], "layers": [0, 1], "precision": "fp16"}]}
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    name = FAMILIES[request.param]
    return Suite(ENTRIES[name], tmp_path_factory.mktemp(name))


def graphs(model: Model) -> list[Graphs]:
    """Of each denoiser, inside of whatever else is around its blocks."""
    found = []
    for stack in stacks(model):
        run: Any = stack._run
        while not isinstance(getattr(run.func, "__self__", None), Graphs):
            run = run.args[0]
        found.append(run.func.__self__)
    return found


@pytest.mark.parametrize("feature", ["nothing", "step cache", "int8", "LoRA", "attention by step"])
def test_cuda_graphs_change_nothing(suite: Suite, feature: str) -> None:
    settings: dict[str, Any] = {
        "nothing": {},
        "step cache": CACHE,
        "int8": INT8,
        "LoRA": suite.lora,
        "attention by step": INNER_STEPS_FP16,
    }[feature]
    settings = settings | {"device": "cuda", "dtype": "bfloat16", "threads": None}
    plain = Model(suite.entry, suite.folder, cuda_graph_tokens=0, **settings)
    model = Model(suite.entry, suite.folder, **settings)
    same_in_turns(plain, model, tea(halfway(plain)) if feature == "step cache" else None)
    for each in graphs(model):
        assert any(kept.replay is not None for kept in each.kept.values())


def test_graphs_of_the_warm_up_are_of_kernels_that_are_still_chosen(suite: Suite) -> None:
    """The warm-up computes batches that come again, and chooses kernels anew after them."""
    on = {"device": "cuda", "dtype": "bfloat16", "threads": None}
    plain = Model(suite.entry, suite.folder, cuda_graph_tokens=0, warm_up_seconds=4, **on)
    model = Model(suite.entry, suite.folder, warm_up_seconds=4, **on)
    assert model.ready.warnings == ()
    for _ in range(3):
        expected, got = run(plain, *company(plain)), run(model, *company(plain))
        for name, one in expected.items():
            assert torch.equal(got[name].latents, one.latents)
    assert all(any(kept.replay is not None for kept in each.kept.values()) for each in graphs(model))
