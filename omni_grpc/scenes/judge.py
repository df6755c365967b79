"""What a picture shows, by arithmetic: segments by colour, the shape that fits each best, compared with a wish."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from omni_grpc.scenes.shapes import EVERY_COLOUR, KNOWN, Vocabulary, coverage
from omni_grpc.scenes.wish import PLACES, Noun, Wish

Pixels = NDArray[np.uint8]

FOREGROUND = 32
"""A pixel belongs to a thing where a channel differs by more than this from the background under it."""
PURE = 55.0
"""... and to the inside of one where its colour is this close to one of the ten."""
LEAST_AREA = 0.0012
"""Segments whose inside is below this share of the picture are specks or lines."""
LEAST_MATCH = 0.72
"""Intersection over union that a segment needs with the best shape."""
AT_PLACE = 0.15
"""How far a middle may be from where it was asked to be, in units of width and height."""
SMALL, LARGE = 0.15, 0.235
"""Radius, in units of the shorter edge, up to and from which a thing that is alone is small or large."""


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """A thing in a picture: middle in units of width and height, radius in units of the shorter edge, and how well the
    shape fits (intersection over union).
    """

    colour: str
    shape: str
    x: float
    y: float
    radius: float
    match: float


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """`things`: exactly the wished ones are there. `where`: places, sizes and the relation hold. `ground`: so does the
    background.
    """

    things: bool
    where: bool
    ground: bool

    @property
    def right(self) -> bool:
        """The measure of prompt accuracy: colours, shapes, number, and where they are."""
        return self.things and self.where


def judge(wish: Wish, picture: Pixels, words: Vocabulary = KNOWN) -> Verdict:
    """Compares a picture, height x width x 3, with what it should show. Every thing in it is one of these words."""
    found = look(picture, words)
    pairs = _assign(wish, found)
    held = pairs is not None and _holds(wish, pairs)
    return Verdict(pairs is not None, held, _background_holds(wish, picture, words))


def look(picture: Pixels, words: Vocabulary = KNOWN) -> list[Seen]:
    """Every thing in a picture, the largest first."""
    height, width = picture.shape[:2]
    image = picture.astype(np.float32)
    ground = _ground(image)
    foreground = np.abs(image - ground).max(-1) > FOREGROUND
    palette = np.array([EVERY_COLOUR[colour] for colour in words.colours], np.float32)
    distance = np.linalg.norm(image[:, :, None] - palette, axis=-1)
    nearest = distance.argmin(-1)
    pure = foreground & (distance.min(-1) < PURE)
    segments = [
        (segment, colour)
        for place, colour in enumerate(words.colours)
        for segment in _segments(pure & (nearest == place))
        if _inner(segment).sum() >= LEAST_AREA * height * width
    ]
    segments.sort(key=lambda it: it[0].sum())
    # edges are mixtures of two colours, and a smaller thing lies in front of a larger one
    ignored = foreground & ~pure
    found = []
    for segment, colour in segments:
        match, shape, x, y, radius = max(
            (_fit(shape, segment, ignored) for shape in words.shapes), key=lambda fit: fit[0]
        )
        if match >= LEAST_MATCH:
            found.append(Seen(colour, shape, x / width, y / height, radius / min(width, height), match))
        ignored = ignored | segment
    return found[::-1]


def _ground(image: NDArray[np.float32]) -> NDArray[np.float32]:
    """The background as a plane in each channel, through the outermost pixels: one colour, or a gradient."""
    height, width = image.shape[:2]
    down, right = np.mgrid[0:height, 0:width]
    rim = (down < 2) | (down >= height - 2) | (right < 2) | (right >= width - 2)
    features = np.stack([np.ones(rim.sum()), down[rim] / height, right[rim] / width], -1)
    planes, *_ = np.linalg.lstsq(features, image[rim], rcond=None)
    everywhere = np.stack([np.ones_like(down, float), down / height, right / width], -1)
    ground: NDArray[np.float32] = (everywhere @ planes).astype(np.float32)
    return ground


def _inner(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """A mask without its outermost pixels: nothing is left of a line."""
    inner = np.zeros_like(mask)
    inner[1:-1, 1:-1] = mask[1:-1, 1:-1] & mask[:-2, 1:-1] & mask[2:, 1:-1] & mask[1:-1, :-2] & mask[1:-1, 2:]
    return inner


def _segments(mask: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """The connected parts of a mask, by edges."""
    height, width = mask.shape
    left = set(np.flatnonzero(mask).tolist())
    parts = []
    while left:
        start = left.pop()
        part, waiting = [start], [start]
        while waiting:
            at = waiting.pop()
            column = at % width
            for near, inside in (
                (at - width, True),
                (at + width, True),
                (at - 1, column > 0),
                (at + 1, column < width - 1),
            ):
                if inside and near in left:
                    left.remove(near)
                    part.append(near)
                    waiting.append(near)
        segment = np.zeros(height * width, bool)
        segment[part] = True
        parts.append(segment.reshape(height, width))
    return parts


@functools.cache
def _bounds(shape: str) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a shape in units of its radius, y downwards."""
    rows, columns = np.nonzero(coverage(shape, 200, 200, 100, 400, 400) > 0.5)
    left, right = (columns.min() - 200) / 100, (columns.max() + 1 - 200) / 100
    top, bottom = (rows.min() - 200) / 100, (rows.max() + 1 - 200) / 100
    return float(left), float(top), float(right), float(bottom)


def _fit(shape: str, segment: NDArray[np.bool_], ignored: NDArray[np.bool_]) -> tuple[float, str, float, float, float]:
    """How well the shape of the same extent fits, and its middle and radius in pixels."""
    rows, columns = np.nonzero(segment)
    # the outermost pixels of a thing are mixtures and not in the segment: half a pixel on either side
    left, right = columns.min() - 0.5, columns.max() + 1.5
    top, bottom = rows.min() - 0.5, rows.max() + 1.5
    bounds = _bounds(shape)
    across, down = (right - left) / (bounds[2] - bounds[0]), (bottom - top) / (bounds[3] - bounds[1])
    radius = (across + down) / 2
    x = (left + right) / 2 - radius * (bounds[0] + bounds[2]) / 2
    y = (top + bottom) / 2 - radius * (bounds[1] + bounds[3]) / 2
    wanted = coverage(shape, x, y, radius, *segment.shape) > 0.5
    counted = ~ignored
    union = ((segment | wanted) & counted).sum()
    return float((segment & wanted & counted).sum() / max(1, union)), shape, float(x), float(y), float(radius)


def _assign(wish: Wish, found: Sequence[Seen]) -> list[tuple[Noun, Seen]] | None:
    """Each wished thing with one that was seen; None where one lacks, or one is too many."""
    left = list(found)
    pairs = []
    for noun in wish.nouns:
        for _ in range(noun.count):
            match = next((seen for seen in left if (seen.colour, seen.shape) == (noun.colour, noun.shape)), None)
            if match is None:
                return None
            left.remove(match)
            pairs.append((noun, match))
    return None if left else pairs


def _holds(wish: Wish, pairs: Sequence[tuple[Noun, Seen]]) -> bool:
    for noun, seen in pairs:
        if noun.place is not None:
            x, y = PLACES[noun.place]
            if abs(seen.x - x) > AT_PLACE or abs(seen.y - y) > AT_PLACE:
                return False
        if (noun.size == "small" and seen.radius > SMALL) or (noun.size == "large" and seen.radius < LARGE):
            return False
    if wish.relation is None:
        return True
    first, second = pairs[0][1], pairs[1][1]
    right, down = second.x - first.x, second.y - first.y
    holds: Mapping[str, bool] = {
        "left of": right > abs(down),
        "right of": -right > abs(down),
        "above": down > abs(right),
        "below": -down > abs(right),
        "inside": max(abs(right), abs(down)) < 0.15 and first.radius < second.radius,
    }
    return holds[wish.relation]


def _background_holds(wish: Wish, picture: Pixels, words: Vocabulary) -> bool:
    if wish.background is None:
        return True
    ground = _ground(picture.astype(np.float32))
    if wish.background.to is None:
        return _is(wish.background.colour, ground.mean((0, 1)), words)
    edges = (ground[0], ground[-1]) if wish.background.vertical else (ground[:, 0], ground[:, -1])
    wanted = (wish.background.colour, wish.background.to)
    return all(_is(colour, edge.mean(0), words) for colour, edge in zip(wanted, edges, strict=True))


def _is(colour: str, rgb: NDArray[np.float32], words: Vocabulary) -> bool:
    distances = {name: float(np.linalg.norm(rgb - np.array(EVERY_COLOUR[name]))) for name in words.colours}
    return min(distances, key=lambda name: distances[name]) == colour
