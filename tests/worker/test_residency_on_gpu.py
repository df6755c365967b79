"""Weights that leave a CUDA device and come back. Needs diffusers, for the tiny checkpoints."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from omni_grpc.checkpoint import sizes
from omni_grpc.config import EngineConfig
from omni_grpc.features.cuda_graphs import Graphs
from omni_grpc.resolve.residency import GIB, sizes_of
from omni_grpc.worker.reachable import storages, tensors
from tests.features.suite import FAMILIES, INT8, Suite, stacks
from tests.models.cases import ENTRIES
from tests.models.model import Model, Result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "threads": None}


@pytest.fixture(scope="module", params=sorted(ENTRIES))
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(ENTRIES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def no_limit() -> Iterator[None]:
    """What a budget limits is the process, and others run in it."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def same(got: list[Result], expected: list[Result]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.latents, other.latents)
        assert one.differs_from(other) == (0, 0)


def made(model: Model) -> list[Result]:
    """Often enough for a batch to be captured in a graph."""
    draft = model.guided()
    return list(itertools.chain.from_iterable(model.run(draft, draft) for _ in range(3)))


def graphs(model: Model) -> list[Graphs]:
    found = []
    for stack in stacks(model):
        run: Any = stack._run
        while run is not None and not isinstance(getattr(run.func, "__self__", None), Graphs):
            run = run.args[0] if getattr(run, "args", ()) and hasattr(run.args[0], "func") else None
        found += [] if run is None else [run.func.__self__]
    return found


def on_device(model: Model) -> int:
    found = storages(tensors(model.components, model.pipeline), torch.device("cuda"))
    return sum(shared[0].untyped_storage().nbytes() for shared in found.values())


def test_a_model_that_slept_makes_the_same_and_left_nothing_on_the_device(suite: Suite) -> None:
    model = Model(suite.entry, suite.folder, **CUDA)
    expected = made(model)
    captured = [sum(kept.replay is not None for kept in each.kept.values()) for each in graphs(model)]
    assert any(captured)
    for _ in range(2):
        before = torch.cuda.memory_reserved()
        freed = model.residency.sleep()
        assert freed == before - torch.cuda.memory_reserved() > 0
        assert on_device(model) == 0
        assert not any(each.kept for each in graphs(model))
        model.residency.wake()
        assert on_device(model) >= model.ready.device_bytes
        same(made(model), expected)
        again = [sum(kept.replay is not None for kept in each.kept.values()) for each in graphs(model)]
        # batches that were seen before the sleep are captured earlier after it
        assert all(now >= before for now, before in zip(again, captured, strict=True))


def test_copies_are_pinned(suite: Suite) -> None:
    model = Model(suite.entry, suite.folder, **CUDA)
    model.residency.sleep()
    copies = model.residency._weights
    assert copies is not None
    assert all(held.copy.is_pinned() for held in copies._held.values())
    model.residency.wake()


def test_encoders_that_leave_change_nothing(suite: Suite) -> None:
    plain = Model(suite.entry, suite.folder, **CUDA)
    expected, whole = made(plain), plain.ready.device_bytes
    del plain
    model = Model(suite.entry, suite.folder, enable_cpu_offload=True, **CUDA)
    assert model.staging is not None
    assert model.ready.device_bytes < whole
    same(made(model), expected)
    assert model.staging.present == ()
    model.residency.sleep()
    assert on_device(model) == 0
    model.residency.wake()
    same(made(model), expected)


def test_the_least_budget_changes_nothing(suite: Suite) -> None:
    plain = Model(suite.entry, suite.folder, **CUDA)
    expected = made(plain)
    checkpoint = plain.checkpoint
    del plain
    config = EngineConfig.from_settings(model=str(suite.folder))
    it = sizes_of(config, checkpoint, sizes.headers(suite.folder), "bfloat16")
    held = sum(denoiser.with_resident(0) for denoiser in it.denoisers)
    budget = it.peak(held, max(part.by_block + part.work for part in it.parts), blocks_move=True)
    model = Model(suite.entry, suite.folder, gpu_memory_budget=budget / GIB, enable_layerwise_offload=True, **CUDA)
    assert "0 of " in model.ready.found.residency
    same(made(model), expected)
    model.residency.sleep()
    model.residency.wake()
    same(made(model), expected)
    # another process would get what is beyond the budget
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(budget + (1 << 20), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("feature", ["int8", "LoRA"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weights_that_features_made_sleep_too(
    family: str, feature: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = FAMILIES[family]
    it = Suite(ENTRIES[name], tmp_path_factory.mktemp(name))
    model = Model(it.entry, it.folder, **(INT8 if feature == "int8" else it.lora), **CUDA)
    expected = made(model)
    model.residency.sleep()
    assert on_device(model) == 0
    model.residency.wake()
    same(made(model), expected)


def test_a_dropped_model_gives_its_memory_back(suite: Suite) -> None:
    model = Model(suite.entry, suite.folder, **CUDA)
    made(model)
    residency, before = model.residency, torch.cuda.memory_reserved()
    residency.begin_drop()
    del model
    freed = residency.end_drop()
    assert freed == before - torch.cuda.memory_reserved() > 0
