"""A model in one process, as what ranks are compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from omni_grpc.types.ranks import ParallelSizes
from omni_grpc.types.request import Request
from omni_grpc.types.step_cache import TeaCache
from tests.models.model import Model
from tests.parallel.model_jobs import Features, Made, run_model, serve
from tests.parallel.ranks import ONE, Ranks

TOLERANCE = 2e-5

GATHERED = ParallelSizes(sequence_parallel_size=2)
ULYSSES = ParallelSizes(ulysses_degree=2)
WEIGHTS = ParallelSizes(tensor_parallel_size=2)
NONE: Features = {}
CACHE: Features = {"cache_backend": "tea_cache"}
WAYS: Mapping[str, ParallelSizes] = {"sequence parallel": GATHERED, "Ulysses": ULYSSES, "tensor parallel": WEIGHTS}
"""Those that every registered model is tried on."""

ONE_WAY: Mapping[str, ParallelSizes] = {
    **WAYS,
    "ring": ParallelSizes(ring_degree=2),
    "CFG parallel": ParallelSizes(cfg_parallel_size=2),
    "pipeline parallel": ParallelSizes(pipeline_parallel_size=2),
    "HSDP": ParallelSizes(sequence_parallel_size=2, use_hsdp=True),
}
"""Ranks that share one thing; HSDP is of those that share tokens."""

TWO_WAYS: Mapping[str, ParallelSizes] = {
    "Ulysses x sequence parallel": ParallelSizes(ulysses_degree=2, sequence_parallel_size=4),
    "Ulysses in a ring": ParallelSizes(ulysses_degree=2, ring_degree=2),
    "tensor x sequence parallel": ParallelSizes(tensor_parallel_size=2, sequence_parallel_size=2),
    "tensor parallel x Ulysses": ParallelSizes(tensor_parallel_size=2, ulysses_degree=2),
    "tensor parallel x ring": ParallelSizes(tensor_parallel_size=2, ring_degree=2),
    "pipeline x tensor parallel": ParallelSizes(pipeline_parallel_size=2, tensor_parallel_size=2),
    "pipeline x sequence parallel": ParallelSizes(pipeline_parallel_size=2, sequence_parallel_size=2),
    "pipeline parallel x Ulysses": ParallelSizes(pipeline_parallel_size=2, ulysses_degree=2),
    "pipeline parallel x ring": ParallelSizes(pipeline_parallel_size=2, ring_degree=2),
    "CFG x sequence parallel": ParallelSizes(cfg_parallel_size=2, sequence_parallel_size=2),
    "CFG parallel x Ulysses": ParallelSizes(cfg_parallel_size=2, ulysses_degree=2),
    "CFG parallel x ring": ParallelSizes(cfg_parallel_size=2, ring_degree=2),
    "CFG x tensor parallel": ParallelSizes(cfg_parallel_size=2, tensor_parallel_size=2),
    "CFG x pipeline parallel": ParallelSizes(cfg_parallel_size=2, pipeline_parallel_size=2),
    "HSDP x Ulysses": ParallelSizes(ulysses_degree=2, use_hsdp=True),
    "HSDP x ring": ParallelSizes(ring_degree=2, use_hsdp=True),
    "HSDP x Ulysses in a ring": ParallelSizes(ulysses_degree=2, ring_degree=2, use_hsdp=True),
    "HSDP x CFG parallel": ParallelSizes(cfg_parallel_size=2, sequence_parallel_size=2, use_hsdp=True),
}
"""Ranks that share two things: all pairs that are not refused by `check_sizes`."""

ALL_WAYS: Mapping[str, ParallelSizes] = {**ONE_WAY, **TWO_WAYS}


def spread(*ways: str, like: str, close: str, also: str = "") -> pytest.MarkDecorator:
    """Runs a test in each of these ways, with `also` beside it, as a line of the table of what is tested."""
    marks = {way: pytest.mark.shows(f"{also} x {way}" if also else way, like, close) for way in ways}
    return pytest.mark.parametrize("way", [pytest.param(way, marks=mark) for way, mark in marks.items()])


Joins = list[tuple[int, Request]]
"""Requests, each with the tick at which it joins."""


class Alone:
    """What is asked of a model: unlike sizes, with and without guidance, the smallest size, and a request that joins
    late; and what it makes of that. `ranks`: where it is computed by the first of them, on its device.
    """

    def __init__(self, model: Model, ranks: Ranks | None = None) -> None:
        self.ranks = ranks
        size = model.checkpoint.limits.min_size
        drafts = [
            (0, model.draft(width=size, height=size, steps=4)),
            (0, model.guided(wider=1, steps=5, seeds=(1, 2))),
            (1, model.guided(higher=1, steps=4, seeds=(3,), prompt="two blue squares left of a star")),
        ]
        self.joins: Joins = [(tick, model.request(draft, f"job_{n}")) for n, (tick, draft) in enumerate(drafts)]
        self.checkpoint = model.checkpoint
        self.made = self.run({}, self.joins)

        self._pixels: dict[str, torch.Tensor] = {}

    def pixels(self, request: Request) -> torch.Tensor:
        """What a worker in one process makes of a request."""
        if request.id not in self._pixels:
            self._pixels[request.id] = serve(None, self.checkpoint, request, 0.0)[0]
        return self._pixels[request.id]

    def run(self, features: Features, joins: Joins) -> Made:
        if self.ranks is None:
            return run_model(None, self.checkpoint, features, joins)
        made: Made = self.ranks.run(run_model, self.checkpoint, features, joins, sizes=ONE)[0]
        return made

    def on(self, ranks: Ranks, sizes: ParallelSizes, joins: Joins, features: Features = NONE) -> list[Made]:
        """What ranks make, who agree bit for bit."""
        results: list[Made] = ranks.run(run_model, self.checkpoint, features, joins, sizes=sizes)
        for made in results:
            assert made.latents.keys() == self.made.latents.keys()
            assert all(torch.equal(x, results[0].latents[name]) for name, x in made.latents.items())
            assert made.reused == results[0].reused
        return results

    def changed(self, **changes: Any) -> Joins:
        return [(tick, dataclasses.replace(request, **changes)) for tick, request in self.joins]

    def half_cached(self) -> Joins:
        """With a threshold of the step cache that some steps stay below."""

        def joins(threshold: float) -> Joins:
            return self.changed(cache=TeaCache(rel_l1_thresh=threshold, coefficients=(1.0, 0.0)))

        never = self.run(CACHE, joins(0.0))
        return joins(1.5 * never.change / never.measured)


def close(mine: Made, theirs: Made, tolerance: float = TOLERANCE) -> None:
    for name, expected in theirs.latents.items():
        torch.testing.assert_close(mine.latents[name], expected, rtol=0, atol=tolerance)


def differ(mine: Made, theirs: Made) -> bool:
    return any((mine.latents[name] - x).abs().max() > 1e-4 for name, x in theirs.latents.items())


def skips_alike(alone: Alone, ranks: Ranks, way: str, tolerance: float = TOLERANCE) -> None:
    """With the step cache, ranks skip what one process skips."""
    halfway = alone.half_cached()
    expected = alone.run(CACHE, halfway)
    made, *_ = alone.on(ranks, ALL_WAYS[way], halfway, CACHE)
    assert made.reused == expected.reused
    assert any(made.reused.values())
    close(made, expected, tolerance)
    assert differ(made, alone.made)
