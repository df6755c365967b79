"""What is kept from one request for another, cache by cache: two requests that differ in an adapter or in its scale
alone get what each gets by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import omni_grpc
from omni_grpc.pipeline.state import COND
from omni_grpc.types.lora import Lora
from omni_grpc.types.request import Request
from omni_grpc.types.step_cache import CacheDraft
from tests.features.graphed import graphed
from tests.features.suite import CACHE, FAMILIES, FIRST, OFFLOAD, SECOND, Run, Suite, alone, far, run, save, tea
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.worker.host_device import PretendMemory

TOLERANCE = 1e-5
WORDS = "words"
"""An adapter of the text encoders."""

PAIRS: Mapping[str, tuple[tuple[Lora, ...], tuple[Lora, ...]]] = {
    "an adapter or none": ((), (Lora(lora_id=FIRST),)),
    "two adapters": ((Lora(lora_id=FIRST),), (Lora(lora_id=SECOND),)),
    "two scales": ((Lora(lora_id=FIRST),), (Lora(lora_id=FIRST, scale=0.5),)),
    "two scales of the encoders": ((Lora(lora_id=WORDS),), (Lora(lora_id=WORDS, scale=0.5),)),
    "two targets": (
        (Lora(lora_id=FIRST), Lora(lora_id=WORDS)),
        (Lora(lora_id=FIRST, target="transformer"), Lora(lora_id=WORDS, scale=0.0)),
    ),
}
"""What the requests of a pair have; all else is the same."""

ALWAYS = tea(10.0)


@dataclasses.dataclass
class Subject:
    suite: Suite
    settings: dict[str, Any]

    def load(self, *features: Mapping[str, Any]) -> Model:
        return self.suite.load(self.settings, *features)

    def pair(self, model: Model, pair: str, cache: CacheDraft | None = None) -> list[Request]:
        return [
            model.request(model.guided(steps=5, seeds=(3,), loras=loras, cache=cache), f"job{number}")
            for number, loras in enumerate(PAIRS[pair])
        ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    @functools.cache
    def subject(entry: str) -> Subject:
        suite = Suite(ENTRIES[entry], tmp_path_factory.mktemp(entry))
        tensors, generator = {}, torch.Generator().manual_seed(1)
        for component in ("text_encoder", "text_encoder_2"):
            encoder = getattr(suite.load().pipeline, component, None)
            for path, part in [] if encoder is None else encoder.encoder.named_modules():
                if isinstance(part, nn.Linear):
                    out, inside = part.weight.shape
                    down = torch.randn(2, inside, generator=generator) * part.weight.std()
                    tensors[f"{component}.{path}.lora_A.weight"] = down
                    tensors[f"{component}.{path}.lora_B.weight"] = torch.randn(out, 2, generator=generator)
        save(tensors, suite.folder.parent / f"{WORDS}.safetensors")
        files = {name: str(path) for name, path in suite.adapters.items()}
        return Subject(suite, {"lora": files | {WORDS: str(suite.folder.parent / f"{WORDS}.safetensors")}})

    return subject


@pytest.fixture(params=FAMILIES.values())
def it(request: pytest.FixtureRequest, made: Callable[[str], Subject]) -> Subject:
    return made(request.param)


def same(got: Run, expected: Run) -> None:
    assert far(got.latents, expected.latents) < TOLERANCE * max(1.0, float(expected.latents.abs().max()))


def in_turn(model: Model, *requests: Request) -> list[Run]:
    """One after the other on one runner."""
    return [alone(model, request) for request in requests]


def each_alone(it: Subject, pair: str) -> list[Run]:
    """What a pair gets where nothing is shared."""
    runs = in_turn(it.load(), *it.pair(it.load(), pair))
    if pair != "two targets" or it.suite.components != ("transformer",):
        assert far(runs[0].latents, runs[1].latents) > 1e-3
    return runs


every_pair = pytest.mark.parametrize("pair", PAIRS)


@every_pair
def test_tables_of_timesteps(pair: str, it: Subject) -> None:
    """Both requests live at once, so that the second finds the tables of the first."""
    model, expected = it.load(), each_alone(it, pair)
    requests = it.pair(model, pair)
    together = run(model, *((0, request) for request in requests))
    for request, one in zip(requests, expected, strict=True):
        same(together[request.id], one)


@every_pair
def test_requests_share_tables_if_and_only_if_they_have_the_same_adapters(pair: str, it: Subject) -> None:
    model = it.load()
    first, second = it.pair(model, pair)
    again = dataclasses.replace(first, id="again", seeds=(9,))
    with torch.inference_mode():
        tables = [model.pipeline.prepare(request)[0].cond[COND].tables for request in (first, second, again)]
    assert tables[0] is tables[2]
    assert tables[0] is not tables[1]


@every_pair
def test_the_packed_batch_of_the_step_before(pair: str, it: Subject) -> None:
    """One request takes the place of the other in a batch of the same geometry."""
    model, (_, expected) = it.load(), each_alone(it, pair)
    first, second = it.pair(model, pair)
    runner = model.runner()
    for request in (first, second):
        runner.prepare(request)
    runner.step((first.id,))
    for _ in range(second.steps * (2 if expected.evals[0] == 2 else 1)):
        runner.step((second.id,))
    assert far(model.result(runner, second).latents, expected.latents) < TOLERANCE * max(
        1.0, float(expected.latents.abs().max())
    )


@every_pair
def test_step_cache(pair: str, it: Subject) -> None:
    """It answers for each from what it knows of that one."""
    model = it.load(CACHE)
    requests = it.pair(model, pair, ALWAYS)
    together = run(model, *((0, request) for request in requests))
    for request, expected in zip(requests, in_turn(model, *requests), strict=True):
        assert sum(expected.answered) > 0
        assert together[request.id].answered == expected.answered
        same(together[request.id], expected)


@every_pair
def test_cuda_graphs(pair: str, it: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was captured for one request would answer the other with its adapters."""
    expected = each_alone(it, pair)
    model, recorders = graphed(it.suite, monkeypatch, **it.settings)
    requests = it.pair(model, pair)
    for _ in range(3):
        for got, one in zip(in_turn(model, *requests), expected, strict=True):
            same(got, one)
    assert sum(recorder.replayed for recorder in recorders) > 0


@pytest.mark.parametrize("pair", ["two adapters", "two scales of the encoders"])
@pytest.mark.parametrize("features", [{"enable_cpu_offload": True}, {}], ids=["CPU offload", "sleep and wake"])
def test_weights_that_come_and_go(features: dict[str, Any], pair: str, it: Subject) -> None:
    """Encoders come back without what another request's adapters made of them, and with the adapters."""
    expected = each_alone(it, pair)
    model = Model(it.suite.entry, it.suite.folder, memory=PretendMemory(), **it.settings, **features)
    adapters = model.residency.adapters
    assert adapters is not None
    for request, one in zip(it.pair(model, pair), expected, strict=True):
        adapters.admit(request)
        same(alone(model, request), one)
        adapters.release(request.id)
        if not features:
            model.residency.sleep()
            model.residency.wake()
            adapters.wake()


@pytest.mark.parametrize("pair", ["two scales", "two scales of the encoders"])
def test_layerwise_offload(pair: str, it: Subject) -> None:
    model = it.load(OFFLOAD)
    for request, one in zip(it.pair(model, pair), each_alone(it, pair), strict=True):
        same(alone(model, request), one)


CACHES: Mapping[str, str] = {
    "features/attention.py": "by precision: which kernels there are",
    "features/lora/variants.py": "by the adapters and scales of rows: what weights are with them, test_lora_copies",
    "features/lora/cache.py": "by the load of an adapter: which are on a device",
    "features/step_cache/spectrum.py": "by length, noise level and exponent: gains of frequencies",
    "features/cuda_graphs.py": "by what parts of the blocks look at in an owner: test_cuda_graphs",
    "features/sequence_parallel.py": "by geometry: how rows are cut",
    "nn/rows.py": "by geometry: layouts, without tensors of requests",
    "pipeline/causal_vae.py": "by class: faster subclasses of layers",
    "pipeline/tables.py": "by what parts of the pipeline look at in an owner: test_tables_of_timesteps",
    "worker/phases.py": "weights of components: test_weights_that_come_and_go",
}
"""Files with caches that outlive a request, and by what their entries are told apart. What is kept in the slots of a
state ends with it; the step cache is there: test_step_cache.
"""


def test_each_cache_of_the_worker_is_named_here() -> None:
    """Add a test above for a new one, or say why it has nothing of a request."""
    root = Path(omni_grpc.__file__).parent
    kept = re.compile(r"functools\.(lru_)?cache\b|Weak(Value|Key)Dictionary\[|OrderedDict\[")
    found = {
        str(file.relative_to(root))
        for folder in ("features", "models", "nn", "pipeline", "worker")
        for file in sorted((root / folder).rglob("*.py"))
        if kept.search(file.read_text(encoding="utf-8"))
    }
    assert found == CACHES.keys()
