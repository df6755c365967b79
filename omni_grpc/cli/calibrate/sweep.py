"""Speed against quality: draws the same prompts with many settings, and chooses those that qualities stand for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from omni_grpc.cli.bench import accuracy
from omni_grpc.cli.bench.figures import Pixels
from omni_grpc.omni import Omni
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Draft
from omni_grpc.types.step_cache import CacheCount, CacheDraft, CacheQuality, Observation

GRID: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "tea_cache": {"rel_l1_thresh": (0.05, 0.1, 0.15, 0.2, 0.3, 0.5), "max_continuous_cached_steps": (2, 4)},
    "first_block": {"threshold": (0.05, 0.08, 0.12, 0.2), "max_continuous_cached_steps": (2, 4)},
    "cache_dit": {
        "residual_diff_threshold": (0.08, 0.12, 0.24, 1.0),
        "max_warmup_steps": (4,),
        "max_continuous_cached_steps": (2, 3, 5),
        "taylorseer_order": (0, 1),
    },
    "mag_cache": {"threshold": (0.04, 0.1, 0.24), "max_skip_steps": (2, 3, 5), "retention_ratio": (0.1, 0.2)},
    "sea_cache": {"threshold": (0.1, 0.15, 0.2, 0.3, 0.5), "max_consecutive_cached": (2, 3)},
}
"""Method -> field -> the values that are tried, each with each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Floor:
    """The least PSNR over the prompts against the same pictures without a cache, in dB: median, 5th percentile."""

    median: float
    worst: float

    def holds(self, point: Point) -> bool:
        return point.psnr_median >= self.median and point.psnr_5th >= self.worst


FLOORS: Mapping[CacheQuality, Floor] = {
    CacheQuality.NEAR_LOSSLESS: Floor(38.0, 36.0),
    CacheQuality.BALANCED: Floor(32.0, 25.0),
    CacheQuality.FAST: Floor(26.0, 18.0),
}
"""What each quality keeps. The 5th percentile counts because the few pictures that become others cost the accuracy: on
the bundled model a median of 31 dB went with 5 % fewer correct captions where that of the worst was 18 dB.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A setting, the share of the blocks that it ran, and the PSNR of its pictures in dB: median, 5th percentile."""

    method: str
    given: Mapping[str, Any]
    blocks_run: float
    psnr_median: float
    psnr_5th: float

    @property
    def fewer(self) -> float:
        """How many times fewer blocks ran."""
        return 1.0 / self.blocks_run


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """The pictures of all prompts under one setting, and what its cache counted."""

    pictures: Sequence[Pixels]
    counts: Sequence[CacheCount]

    @property
    def observed(self) -> list[Observation]:
        return [each for count in self.counts for each in count.observed]


def settings(methods: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every setting of GRID for these methods."""
    for method in methods:
        fields = GRID[method]
        for values in itertools.product(*fields.values()):
            yield method, dict(zip(fields, values, strict=True))


def draw(omni: Omni, drafts: Sequence[Draft], cache: CacheDraft | None) -> Drawn:
    """Draws each draft under one cache; None: the server's own."""
    pictures: list[Pixels] = []
    counts: list[CacheCount] = []
    for draft in drafts:
        made = omni.run(dataclasses.replace(draft, cache=cache, output_format=ImageFormat.RAW_RGB8))
        pictures.append(np.asarray(made.images[0]))
        counts += made.stats.cache
    return Drawn(pictures, counts)


def point(method: str, given: Mapping[str, Any], base: Drawn, drawn: Drawn) -> Point:
    """What a setting costs and keeps."""
    likeness = accuracy.likeness(base.pictures, drawn.pictures)
    return Point(
        method=method,
        given=given,
        blocks_run=sum(count.blocks_run for count in drawn.counts) / sum(count.blocks for count in drawn.counts),
        psnr_median=likeness["psnr_median"],
        psnr_5th=likeness["psnr_5th"],
    )


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both, from the most blocks to the fewest."""
    best: list[Point] = []
    for each in sorted(points, key=lambda at: (at.blocks_run, -at.psnr_median)):
        if not best or each.psnr_median > best[-1].psnr_median:
            best.append(each)
    return best[::-1]


def choose(points: Sequence[Point]) -> dict[CacheQuality, Point]:
    """For each quality, the setting of the fewest blocks that keeps its PSNR. None where no setting does."""
    chosen = {}
    for quality, floor in FLOORS.items():
        enough = [each for each in points if floor.holds(each) and each.blocks_run < 1.0]
        if enough:
            chosen[quality] = min(enough, key=lambda at: (at.blocks_run, -at.psnr_median))
    return chosen


def own(points: Sequence[Point], method: str) -> Point | None:
    """The setting of a method that is asked for by its name alone: its near-lossless one, else the one of those that
    reuse anything that keeps the worst pictures best. None where none of its settings reuses anything.
    """
    mine = [each for each in points if each.method == method and each.blocks_run < 1.0]
    gentlest = max(mine, key=lambda at: at.psnr_5th, default=None)
    return choose(mine).get(CacheQuality.NEAR_LOSSLESS, gentlest)
