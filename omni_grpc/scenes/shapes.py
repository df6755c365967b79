"""The shapes and the colours there are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.float32]

COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 38, 38),
    "orange": (245, 145, 30),
    "yellow": (250, 220, 60),
    "green": (40, 160, 70),
    "blue": (40, 90, 220),
    "purple": (130, 50, 170),
    "pink": (250, 150, 190),
    "white": (250, 250, 250),
    "gray": (135, 135, 135),
    "black": (25, 25, 25),
}
"""RGB, 0 to 255."""

# Every function takes an array module (numpy, or torch for a GPU) and coordinates in units of the shape's radius, x to
# the right and y upwards. It gives the distance to the edge, negative inside, exact near the edge and good enough
# elsewhere to smooth it.


def _circle(xp: Any, x: Any, y: Any) -> Any:
    return xp.hypot(x, y) - 1.0


def _square(xp: Any, x: Any, y: Any) -> Any:
    return xp.maximum(abs(x), abs(y)) - 0.87


def _diamond(xp: Any, x: Any, y: Any) -> Any:
    return (abs(x) + abs(y)) / math.sqrt(2.0) - 0.8


def _triangle(xp: Any, x: Any, y: Any) -> Any:
    y = y + 0.15
    return xp.maximum(math.sqrt(0.75) * abs(x) + 0.5 * y, -y) - 0.6


def _star(xp: Any, x: Any, y: Any) -> Any:
    outer, inner, half = 1.12, 0.48, math.pi / 5
    radius, angle = xp.hypot(x, y), abs(xp.arctan2(x, y))
    # fold all ten edges onto the one between the tip at angle 0 and the notch at angle `half`
    folded = abs(angle - 2 * half * xp.round(angle / (2 * half)))
    along, across = radius * xp.cos(folded), radius * xp.sin(folded)
    edge_x, edge_y = inner * math.cos(half) - outer, inner * math.sin(half)
    length = math.hypot(edge_x, edge_y)
    return ((along - outer) * edge_y - across * edge_x) / length


def _ring(xp: Any, x: Any, y: Any) -> Any:
    return abs(xp.hypot(x, y) - 0.76) - 0.24


def _cross(xp: Any, x: Any, y: Any) -> Any:
    wide = xp.maximum(abs(x) - 1.0, abs(y) - 0.32)
    high = xp.maximum(abs(x) - 0.32, abs(y) - 1.0)
    return xp.minimum(wide, high)


def _heart(xp: Any, x: Any, y: Any) -> Any:
    y = y - 0.05
    body = (abs(x) + abs(y + 0.15)) / math.sqrt(2.0) - 0.9 / math.sqrt(2.0)
    lobe = xp.hypot(abs(x) - 0.45, y - 0.3) - 0.9 / math.sqrt(2.0)
    return xp.minimum(body, lobe)


def _arrow(xp: Any, x: Any, y: Any) -> Any:
    head = xp.maximum((abs(x) + y - 1.0) / math.sqrt(2.0), 0.05 - y)
    stem = xp.maximum(xp.maximum(abs(x) - 0.36, y - 0.3), -1.0 - y)
    return xp.minimum(head, stem)


SHAPES: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "ring": _ring,
    "cross": _cross,
    "diamond": _diamond,
    "heart": _heart,
}


NEW_COLOURS: Mapping[str, tuple[int, int, int]] = {"brown": (115, 80, 45)}
NEW_SHAPES: Mapping[str, Callable[[Any, Any, Any], Any]] = {"arrow": _arrow}
"""What the bundled model does not know, and adapters teach it."""

EVERY_COLOUR: Mapping[str, tuple[int, int, int]] = {**COLOURS, **NEW_COLOURS}
EVERY_SHAPE: Mapping[str, Callable[[Any, Any, Any], Any]] = {**SHAPES, **NEW_SHAPES}


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """The shapes and the colours that a wish may have, and that a judge looks for."""

    shapes: tuple[str, ...]
    colours: tuple[str, ...]


KNOWN = Vocabulary(tuple(SHAPES), tuple(COLOURS))
"""That of the bundled model."""
EVERY = Vocabulary(tuple(EVERY_SHAPE), tuple(EVERY_COLOUR))


def coverage(shape: str, x: float, y: float, radius: float, height: int, width: int) -> Mask:
    """How much of each pixel a shape covers, 0 to 1: centre and radius in pixels, y downwards -> [height, width]."""
    down, right = np.mgrid[0:height, 0:width].astype(np.float32) + 0.5
    distance = EVERY_SHAPE[shape](np, (right - x) / radius, (y - down) / radius)
    covered: Mask = np.clip(0.5 - distance * radius, 0.0, 1.0).astype(np.float32)
    return covered
