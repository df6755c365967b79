"""Wishes: what a caption asks for, in parts that can be checked."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Mapping

from omni_grpc.scenes.shapes import EVERY_COLOUR, KNOWN, NEW_COLOURS, NEW_SHAPES, Vocabulary

SIZES: Mapping[str, tuple[float, float]] = {"small": (0.10, 0.13), "large": (0.26, 0.33)}
"""Radius of a thing that is alone, in units of the shorter edge."""

PLACES: Mapping[str, tuple[float, float]] = {
    "top left": (0.24, 0.24),
    "top": (0.5, 0.24),
    "top right": (0.76, 0.24),
    "left": (0.24, 0.5),
    "center": (0.5, 0.5),
    "right": (0.76, 0.5),
    "bottom left": (0.24, 0.76),
    "bottom": (0.5, 0.76),
    "bottom right": (0.76, 0.76),
}
"""Where the middle of a thing is, in units of width and height, y downwards."""

RELATIONS = ("left of", "right of", "above", "below", "inside")
LEAST_CONTRAST = 75.0
"""Distance in RGB of a thing from what is behind it."""

KINDS: Mapping[str, int] = {"one": 34, "count": 10, "relation": 36, "pair": 10, "three": 10}
"""What wishes there are, and how many of a hundred are of each kind."""

HELD_OUT_SHARE = 10
"""One combination in so many is never seen in training."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Noun:
    """So many things of one kind. Without a size or a place, any will do."""

    colour: str
    shape: str
    count: int = 1
    size: str | None = None
    place: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Background:
    """One colour, or two that flow into each other from left to right or from top to bottom."""

    colour: str
    to: str | None = None
    vertical: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """`relation` holds between the first two nouns. Without a background, any will do."""

    nouns: tuple[Noun, ...]
    relation: str | None = None
    background: Background | None = None

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if self.relation:
            return "relation"
        if len(self.nouns) == 1:
            return "one" if self.nouns[0].count == 1 else "count"
        return "pair" if len(self.nouns) == 2 else "three"

    @property
    def held_out(self) -> bool:
        """Whether the combination of colours, shapes and where they are is kept from training.

        Sizes, backgrounds and words do not count: a combination is held out in all of them.
        """
        parts = [f"{noun.count} {noun.colour} {noun.shape} {noun.place}" for noun in self.nouns]
        key = f"{self.relation}: {', '.join(parts)}".encode()
        return hashlib.sha256(key).digest()[0] * HELD_OUT_SHARE < 256


def draw_wish(rng: random.Random, kind: str | None = None, words: Vocabulary = KNOWN) -> Wish:
    """A wish of a kind, or of any, in these words."""
    kind = kind or rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
    background = _background(rng, words) if rng.random() < 0.6 else None
    free = [colour for colour in words.colours if background is None or stands_out(colour, background)]
    if kind == "one":
        size = rng.choice(("small", "large")) if rng.random() < 0.35 else None
        place = rng.choice(tuple(PLACES)) if rng.random() < 0.6 else None
        if size == "large" and place != "center":
            place = None
        return Wish(
            (Noun(colour=rng.choice(free), shape=rng.choice(words.shapes), size=size, place=place),), None, background
        )
    if kind == "count":
        noun = Noun(colour=rng.choice(free), shape=rng.choice(words.shapes), count=rng.choice((2, 2, 3)))
        return Wish((noun,), None, background)
    number = 3 if kind == "three" else 2
    relation = rng.choice(RELATIONS) if kind == "relation" else None
    while True:
        nouns = tuple(Noun(colour=rng.choice(free), shape=rng.choice(words.shapes)) for _ in range(number))
        colours = {noun.colour for noun in nouns}
        # through a ring shows what it lies on, so that nothing tells it from two things
        nested = relation == "inside"
        if len(set(nouns)) == number and not (nested and (len(colours) < 2 or nouns[0].shape == "ring")):
            return Wish(nouns, relation, background)


def draw_new(word: str, rng: random.Random, others: Vocabulary = KNOWN) -> Wish:
    """A wish that has `word`, of NEW_SHAPES or NEW_COLOURS, in one of its things, and other words beside it."""
    words = Vocabulary(
        (*others.shapes, *(shape for shape in NEW_SHAPES if shape == word)),
        (*others.colours, *(colour for colour in NEW_COLOURS if colour == word)),
    )
    while True:
        wish = draw_wish(rng, None, words)
        if any(word in (noun.shape, noun.colour) for noun in wish.nouns):
            return wish


def stands_out(colour: str, background: Background) -> bool:
    """Whether a colour can be told from every part of a background."""
    own, first = EVERY_COLOUR[colour], EVERY_COLOUR[background.colour]
    second = first if background.to is None else EVERY_COLOUR[background.to]
    shares = [step / 10 for step in range(11)]
    return all(
        math.dist(own, [a + share * (b - a) for a, b in zip(first, second, strict=True)]) > LEAST_CONTRAST
        for share in shares
    )


def _background(rng: random.Random, words: Vocabulary) -> Background:
    colour = rng.choice(words.colours)
    if rng.random() < 0.8:
        return Background(colour)
    return Background(colour, rng.choice([other for other in words.colours if other != colour]), rng.random() < 0.5)
