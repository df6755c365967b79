"""Prompt accuracy: renders captions of shapes that training never saw, and judges whether pictures show them."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from omni_grpc.cli.bench import figures
from omni_grpc.cli.bench.figures import Pixels
from omni_grpc.config import EngineConfig
from omni_grpc.omni import Generation, Omni
from omni_grpc.scenes.captions import held_out
from omni_grpc.scenes.judge import Verdict, judge
from omni_grpc.scenes.shapes import KNOWN, Vocabulary
from omni_grpc.scenes.wish import KINDS, Wish
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.results import Effective
from omni_grpc.types.step_cache import CacheCount

ALL = "all"
MAX_PSNR = 100.0
"""The PSNR in dB that identical pictures count as."""

Told = Callable[[int], None]
"""Called with the number of pictures that are done."""


@dataclasses.dataclass(frozen=True, slots=True)
class Caption:
    """`loras`: the adapters that it is drawn with, and their scales."""

    wish: Wish
    text: str
    seed: int
    loras: Mapping[str, float] = dataclasses.field(default_factory=dict)


def captions(count: int, seed: int) -> list[Caption]:
    """The same arguments give the same captions, each with a seed of its own."""
    return [Caption(wish, text, seed + number) for number, (wish, text) in enumerate(held_out(count, seed))]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PictureSettings:
    """Settings that all pictures share; None: the model's default."""

    width: int | None = None
    height: int | None = None
    steps: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Pictures of captions, in their order, and how they were made. `seconds`: of all, loading and the first left out;
    `latency`: the median of one. `blocks_run`: the share of the transformer blocks that ran under a step cache; 1
    without one.
    """

    model: str
    pictures: Sequence[Pixels]
    seconds: float
    latency: float
    blocks_run: float
    effective: Effective


def render(config: EngineConfig, chosen: Sequence[Caption], shape: PictureSettings, told: Told) -> Rendering:
    """Renders every caption, as many at once as the settings let share their steps."""
    with Omni.of(config, alone=True) as omni:

        def draw(caption: Caption) -> tuple[Pixels, Generation]:
            made = omni.generate(
                caption.text,
                seed=caption.seed,
                width=shape.width,
                height=shape.height,
                steps=shape.steps,
                loras=caption.loras or None,
                output_format=ImageFormat.RAW_RGB8,
            )
            return np.asarray(made.images[0]), made

        _, first = draw(chosen[0])  # pays for what is made at first use
        pictures, seconds, began = [], [], time.monotonic()
        counts: list[CacheCount] = []
        with ThreadPoolExecutor(2 * config.scheduler.max_num_seqs) as pool:
            for picture, made in pool.map(draw, chosen):
                pictures.append(picture)
                seconds.append(made.stats.total - made.stats.queue_wait)
                counts += made.stats.cache
                told(len(pictures))
        return Rendering(
            model=omni.checkpoint.name,
            pictures=pictures,
            seconds=time.monotonic() - began,
            latency=statistics.median(seconds),
            blocks_run=sum(count.blocks_run for count in counts) / (sum(count.blocks for count in counts) or 1)
            if counts
            else 1.0,
            effective=first.effective,
        )


def verdicts(chosen: Sequence[Caption], pictures: Sequence[Pixels], words: Vocabulary = KNOWN) -> list[Verdict]:
    return [judge(caption.wish, picture, words) for caption, picture in zip(chosen, pictures, strict=True)]


def by_kind(chosen: Sequence[Caption], found: Sequence[Verdict]) -> dict[str, dict[str, Any]]:
    """Captions, right pictures and the 95 % interval of their share, for each kind and for all; the background is
    counted where a caption names one.
    """
    total, right, named, ground = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for caption, verdict in zip(chosen, found, strict=True):
        for kind in (caption.wish.kind, ALL):
            total[kind] += 1
            right[kind] += verdict.right
            if caption.wish.background is not None:
                named[kind] += 1
                ground[kind] += verdict.ground
    return {
        kind: {
            "captions": total[kind],
            "right": right[kind],
            "accuracy": right[kind] / total[kind],
            "interval": figures.share(right[kind], total[kind]),
            "background": ground[kind] / named[kind] if named[kind] else None,
        }
        for kind in (*KINDS, ALL)
        if total[kind]
    }


def compared(before: Sequence[Verdict], after: Sequence[Verdict]) -> dict[str, Any]:
    """How much more of the same captions are right, with its 95 % interval."""
    mean, interval = figures.difference([v.right for v in before], [v.right for v in after])
    return {"difference": mean, "interval": interval}


def likeness(pictures: Sequence[Pixels], others: Sequence[Pixels]) -> dict[str, Any]:
    """PSNR in dB (identical pictures count as MAX_PSNR) and SSIM of each pair of pictures."""
    pairs = list(zip(pictures, others, strict=True))
    psnr = [min(MAX_PSNR, figures.psnr(*pair)) for pair in pairs]
    return {
        "psnr_median": statistics.median(psnr),
        "psnr_5th": sorted(psnr)[math.floor(0.05 * len(psnr))],
        "ssim_mean": statistics.fmean(figures.ssim(*pair) for pair in pairs),
        "same": sum(np.array_equal(*pair) for pair in pairs),
    }
