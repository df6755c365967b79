"""Adapters of text encoders over ranks: the first rank encodes each prompt with those of its request, for all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from omni_grpc.types.lora import Lora
from omni_grpc.types.ranks import ParallelSizes
from tests.features.suite import FIRST, Suite, save
from tests.models.cases import ENTRIES
from tests.parallel.alone import close
from tests.parallel.model_jobs import run_model
from tests.parallel.ranks import PAIR, Ranks

WORDS = "words"
WAYS = {
    "ring": ParallelSizes(ring_degree=PAIR),
    "tensor parallel": ParallelSizes(tensor_parallel_size=PAIR),
    "CFG parallel": ParallelSizes(cfg_parallel_size=PAIR),
}


@pytest.fixture(scope="module", params=["FluxPipeline-schnell", "QwenImagePipeline"])
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    suite = Suite(ENTRIES[request.param], tmp_path_factory.mktemp(request.param))
    tensors, generator = {}, torch.Generator().manual_seed(4)
    for component in suite.load().checkpoint.text_encoders:
        for path, part in getattr(suite.load().pipeline, component).encoder.named_modules():
            if isinstance(part, nn.Linear):
                down = torch.randn(2, part.in_features, generator=generator) * part.weight.std()
                tensors[f"{component}.{path}.lora_A.weight"] = down
                tensors[f"{component}.{path}.lora_B.weight"] = torch.randn(part.out_features, 2, generator=generator)
    suite.adapters[WORDS] = Path(suite.folder.parent) / f"{WORDS}.safetensors"
    save(tensors, suite.adapters[WORDS])
    suite.lora = {"lora": {name: str(path) for name, path in suite.adapters.items()}}
    return suite


@pytest.mark.parametrize("way", WAYS)
def test_every_rank_gets_what_the_adapters_of_a_request_make_of_its_prompt(
    way: str, suite: Suite, ranks: Ranks
) -> None:
    """Four requests that differ in adapters alone, in one batch."""
    model = suite.load(suite.lora)
    cases = [(), (Lora(lora_id=WORDS),), (Lora(lora_id=WORDS, scale=0.5), Lora(lora_id=FIRST)), (Lora(lora_id=FIRST),)]
    joins = [(0, model.request(model.guided(steps=3, loras=loras), f"job{n}")) for n, loras in enumerate(cases)]
    alone = run_model(None, model.checkpoint, suite.lora, joins)
    first, *others = ranks.run(run_model, model.checkpoint, suite.lora, joins, sizes=WAYS[way])
    close(first, alone)
    for made in others:
        assert all(torch.equal(x, first.latents[name]) for name, x in made.latents.items())
    latents = list(alone.latents.values())
    assert all(float((a - b).abs().max()) > 1e-3 for n, a in enumerate(latents) for b in latents[:n])
