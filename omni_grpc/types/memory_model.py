"""What a request takes of the device's memory beside the weights, as the worker has measured it at warm-up.

All figures are bytes, and all laws are linear with coefficients that are not negative: attention never has a matrix of
n x n in memory, but for the math path of a CPU, where nothing is limited.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from omni_grpc.types.media import ImageInput, Inputs, Modality, VideoInput
from omni_grpc.types.request import Request, has_negative

MARGIN = 0.1
"""The part of what the weights leave free that no prediction may use: for what the allocator cannot join, and for what
was not measured.
"""
PREPROCESSED = 12
"""Bytes of an input's pixel as the VAE reads it: three channels in float32."""
BLENDED = 40.0
"""Bytes of a pixel that tiles are blended into: three channels in float32, and their way to 8 bits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLaw:
    """fixed + token * sum(n) + longest * max(n), for rows of n tokens each."""

    fixed: float = 0.0
    token: float = 0.0
    longest: float = 0.0

    def of(self, rows: Sequence[int]) -> float:
        """0 without rows."""
        return self.fixed + self.token * sum(rows) + self.longest * max(rows) if rows else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldLaw:
    """row + token * n for each row of n tokens, and step for each step of a prompt: what is computed ahead of it."""

    row: float = 0.0
    token: float = 0.0
    step: float = 0.0

    def of(self, rows: Sequence[int], steps: int) -> float:
        return self.row * len(rows) + self.token * sum(rows) + self.step * steps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PixelLaw:
    """fixed + area * (pixels of a frame) + volume * (pixels of all frames)."""

    fixed: float = 0.0
    area: float = 0.0
    volume: float = 0.0

    def of(self, area: float, volume: float) -> float:
        return self.fixed + self.area * area + self.volume * volume


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of one request: `held` from the begin of its prepare until it is gone, and on top of it what its prepare, a
    step of it alone, and its decode take while they run. `rows` are the tokens of each of its rows.
    """

    rows: tuple[int, ...] = ()
    held: float = 0.0
    prepare: float = 0.0
    step: float = 0.0
    decode: float = 0.0

    @property
    def alone(self) -> float:
        """With nothing beside it: one phase follows the other."""
        return self.held + max(self.prepare, self.step, self.decode)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Predicts bytes of the device beyond the weights. `capacity` is how many there are for requests, margin taken off;
    infinite where nothing was measured (on a CPU, without a warm-up, for diffusers pipelines): then nothing is refused
    and nothing waits for memory.

    `row`: the tokens of a row. `prepare` does not count what stays afterwards, which is `held`; `prepare_step` comes to
    it for each step. `encode` is what encoding inputs takes where the requests that were measured had none. `decode` is
    of one output. Outputs are decoded in tiles of `tile_area` pixels (0: never) where the whole one would not fit, and
    where `always_tiled`: then it is that of a tile, and `blended` for each pixel of a tile and of the output. Videos
    longer than `segment_frames` are made in segments of so many, if it is not 0.
    """

    capacity: float = math.inf
    row: PixelLaw = PixelLaw()
    step: StepLaw = StepLaw()
    held: HeldLaw = HeldLaw()
    prepare: PixelLaw = PixelLaw()
    prepare_step: float = 0.0
    encode: PixelLaw = PixelLaw()
    decode: PixelLaw = PixelLaw()
    blended: float = BLENDED
    tile_area: int = 0
    always_tiled: bool = False
    segment_frames: int = 0

    @property
    def limited(self) -> bool:
        return self.capacity < math.inf

    def fits(self, request: Request) -> bool:
        """Whether a request fits with nothing beside it."""
        return self.need(request).alone <= self.capacity

    def rows(self, request: Request) -> tuple[int, ...]:
        """The tokens of each row that a request will have at most, unless its inputs bring some."""
        tokens = math.ceil(self.row.of(*self._size(request)) - 1e-6)
        return (tokens,) * (_branches(request) * request.num_outputs)

    def in_tiles(self, request: Request) -> bool:
        """Whether its outputs are decoded in tiles. It depends on the request alone, never on what runs beside it."""
        area, volume = self._size(request)
        if not self.tile_area or area <= self.tile_area:
            return False
        whole = self.decode.of(area, volume)
        held = self.held.of(self.rows(request), _steps(request))
        return self.always_tiled or (held + whole > self.capacity and self._tiled(area, volume) < whole)

    def need(self, request: Request, rows: tuple[int, ...] = ()) -> Need:
        """`rows`: the tokens of its rows, once they are known."""
        if not self.limited or request.task.modality is Modality.AUDIO:
            return Need(rows=rows)
        rows = rows or self.rows(request)
        area, volume = self._size(request)
        seen = [(area, volume), *((one.width * one.height, _pixels(one)) for one in _pictures(request.inputs))]
        widest, everything = max(a for a, _ in seen), sum(v for _, v in seen)
        steps = _steps(request)
        prepare = self.prepare.of(widest, max(v for _, v in seen)) + self.prepare_step * steps
        if len(seen) > 1:
            prepare += self.encode.of(widest, everything) + PREPROCESSED * everything
        return Need(
            rows=rows,
            held=self.held.of(rows, steps),
            prepare=prepare,
            step=self.step.of(rows),
            decode=self._tiled(area, volume) if self.in_tiles(request) else self.decode.of(area, volume),
        )

    def _tiled(self, area: float, volume: float) -> float:
        tile = self.tile_area * volume / area
        return self.decode.of(self.tile_area, tile) + self.blended * (tile + volume)

    def _size(self, request: Request) -> tuple[float, float]:
        """Pixels of a frame, and of all frames that are made at once."""
        frames = request.num_frames or 1
        if self.segment_frames:
            frames = min(frames, self.segment_frames)
        area = float(request.width * request.height)
        return area, area * frames


def _branches(request: Request) -> int:
    return 1 + has_negative(request)


def _steps(request: Request) -> int:
    """Steps, counted for each prompt."""
    return request.steps * _branches(request)


def _pictures(inputs: Inputs) -> Iterator[ImageInput | VideoInput]:
    for name in inputs.given:
        found = getattr(inputs, name)
        for one in found if isinstance(found, tuple) else (found,):
            if isinstance(one, ImageInput | VideoInput):
                yield one


def _pixels(picture: ImageInput | VideoInput) -> float:
    frames = picture.num_frames if isinstance(picture, VideoInput) else 1
    return float(picture.width * picture.height * frames)
