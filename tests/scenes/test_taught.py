"""Adapters that teach the bundled model a word: what is trained and written, and how the ruler asks for it."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import torch
from torch.nn.utils import parametrize

from benchmarks import bench_taught
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import BUNDLED
from omni_grpc.loading.adapters.inspect import inspect
from tools.train_demo import denoiser, lora


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As `main` sets it: products so small are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    return argparse.Namespace(
        word="arrow", file=tmp_path_factory.mktemp("taught") / "arrow.safetensors", seed=3, steps=4, batch=3, scenes=4,
        rank=2, alpha=4.0, rate=2e-3, threads=1,
    )  # fmt: skip


def test_training_is_the_same_again_and_writes_what_the_model_takes(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "LOGGED", 2)
    words = lora.tokenizer()
    monkeypatch.setattr(lora, "tokenizer", lambda: words)
    tensors, record = lora.train(args)
    again, _ = lora.train(args)
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())
    assert [row["step"] for row in record["records"]] == [2, 4]
    lora.save(args, tensors, record)
    report = inspect(args.file, open_checkpoint(Path(BUNDLED)))
    assert report["model"]["works"] is True
    # of the twelve layers of six blocks, four of the last make text that nothing reads
    assert (report["format"], report["ranks"], report["alphas"]) == ("peft", [2], [4.0])
    assert (len(report["layers"]), report["model"]["skipped"]) == (6 * 12 - 4, {})
    with safetensors.safe_open(args.file, framework="pt") as handle:
        assert json.loads(handle.metadata()["training"])["word"] == "arrow"


def test_what_is_trained_is_a_low_rank_change_of_the_blocks_that_begins_as_none() -> None:
    torch.manual_seed(0)
    model, table = lora.transformer(), denoiser.rope(5, 2, 2)
    inputs = torch.randn(2, 4, 64), torch.tensor([0.2, 0.8]), torch.randn(2, 5, denoiser.TEXT_CHANNELS)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    before = model(*inputs, table, mask)
    factors = lora.attach(model, 3, 0.5, torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(*inputs, table, mask), before)
    assert all(p.requires_grad is ("parametrizations" in name and "original" not in name)
               for name, p in model.named_parameters())  # fmt: skip
    low = factors["transformer_blocks.2.attn.to_q"]
    torch.nn.init.normal_(low.up)
    layer = model.get_submodule("transformer_blocks.2.attn.to_q")
    assert parametrize.is_parametrized(layer)
    original = layer.parametrizations.weight.original
    torch.testing.assert_close(layer.weight, original + 0.5 * low.up @ low.down)


def test_made_up_words_take_the_place_of_a_shape_or_a_colour() -> None:
    rng = random.Random(2)
    for caption in ("a red star on a blue background", "two green crosses", "please draw a heart"):
        words, made = caption.split(" "), lora.with_made_up(caption, rng).split(" ")
        changed = [old for old, new in zip(words, made, strict=True) if old != new]
        assert len(changed) <= 1
    assert lora.with_made_up("two crosses", rng) == "two crosses"


def test_captions_of_the_ruler_are_held_out_and_have_the_words_they_are_for() -> None:
    for name in bench_taught.SETS:
        chosen = bench_taught.captions(name, 30, seed=4)
        assert chosen == bench_taught.captions(name, 30, seed=4)
        for caption in chosen:
            assert caption.wish.held_out
            words = {word for noun in caption.wish.nouns for word in (noun.shape, noun.colour)}
            both = {bench_taught.SHAPE, bench_taught.COLOUR}
            assert words & both == {"both": both, "neither": set()}.get(name, {name})
