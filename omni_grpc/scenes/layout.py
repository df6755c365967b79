"""From a wish to a scene: where everything is, and how large."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
from numpy.typing import NDArray

from omni_grpc.scenes.shapes import COLOURS, EVERY_COLOUR, coverage
from omni_grpc.scenes.wish import PLACES, SIZES, Background, Noun, Wish

MARGIN = 0.03
GAP = 1.12
TRIES = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Thing:
    """Centre in units of width and height, y downwards; radius in units of the shorter edge."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """Things from the back to the front."""

    width: int
    height: int
    things: tuple[Thing, ...]
    background: Background


def arrange(wish: Wish, width: int, height: int, rng: random.Random) -> Scene:
    """A scene that fulfils the wish, in pixels. The rest is left to chance."""
    background = wish.background or _background(wish, rng)
    aspect = (width / min(width, height), height / min(width, height))
    while True:
        if wish.relation is not None:
            things = _related(wish, aspect, rng)
        elif len(wish.nouns) == 1 and wish.nouns[0].count == 1:
            things = [_alone(wish.nouns[0], aspect, rng)]
        else:
            things = _scattered([noun for noun in wish.nouns for _ in range(noun.count)], aspect, rng)
        if things:
            return Scene(width, height, tuple(things), background)


def paint(scene: Scene) -> NDArray[np.uint8]:
    """height x width x 3, RGB."""
    picture = _ground(scene)
    edge = min(scene.width, scene.height)
    for thing in scene.things:
        covered = coverage(
            thing.shape, thing.x * scene.width, thing.y * scene.height, thing.radius * edge, scene.height, scene.width
        )[..., None]
        picture = picture * (1 - covered) + np.array(EVERY_COLOUR[thing.colour], np.float32) * covered
    pixels: NDArray[np.uint8] = picture.round().astype(np.uint8)
    return pixels


def _ground(scene: Scene) -> NDArray[np.float32]:
    ground = scene.background
    first = np.array(EVERY_COLOUR[ground.colour], np.float32)
    second = first if ground.to is None else np.array(EVERY_COLOUR[ground.to], np.float32)
    down, right = np.mgrid[0 : scene.height, 0 : scene.width].astype(np.float32) + 0.5
    share = (down / scene.height if ground.vertical else right / scene.width)[..., None]
    picture: NDArray[np.float32] = first * (1 - share) + second * share
    return picture


def _background(wish: Wish, rng: random.Random) -> Background:
    taken = {noun.colour for noun in wish.nouns}
    return Background(rng.choice([colour for colour in COLOURS if colour not in taken]))


def _alone(noun: Noun, aspect: tuple[float, float], rng: random.Random) -> Thing:
    radius = rng.uniform(*SIZES.get(noun.size or "", (0.14, 0.20) if noun.place else (0.14, 0.25)))
    if noun.place is None:
        x, y = (rng.uniform(radius / side + MARGIN, 1 - radius / side - MARGIN) for side in aspect)
    else:
        # near the place, and within the picture
        x, y = (
            min(max(at + rng.uniform(-0.04, 0.04), radius / side + MARGIN), 1 - radius / side - MARGIN)
            for at, side in zip(PLACES[noun.place], aspect, strict=True)
        )
    return Thing(noun.colour, noun.shape, x, y, radius)


def _related(wish: Wish, aspect: tuple[float, float], rng: random.Random) -> list[Thing]:
    first, second = wish.nouns[:2]
    if wish.relation == "inside":
        radius = rng.uniform(0.34, 0.4)
        x, y = (rng.uniform(radius / side + MARGIN, 1 - radius / side - MARGIN) for side in aspect)
        outer = Thing(second.colour, second.shape, x, y, radius)
        return [outer, Thing(first.colour, first.shape, x, y, rng.uniform(0.26, 0.31) * radius)]
    along = 0 if wish.relation in ("left of", "right of") else 1
    for _ in range(TRIES):
        radii = rng.uniform(0.14, 0.2), rng.uniform(0.14, 0.2)
        places = [[rng.uniform(r / s + MARGIN, 1 - r / s - MARGIN) for s in aspect] for r in radii]
        ahead = (places[1][along] - places[0][along]) * aspect[along]
        if wish.relation in ("right of", "below"):
            ahead = -ahead
        aside = abs(places[0][1 - along] - places[1][1 - along]) * aspect[1 - along]
        if ahead > GAP * sum(radii) and aside < 0.12:
            return [
                Thing(noun.colour, noun.shape, x, y, radius)
                for noun, (x, y), radius in zip((first, second), places, radii, strict=True)
            ]
    return []


def _scattered(nouns: list[Noun], aspect: tuple[float, float], rng: random.Random) -> list[Thing]:
    most = 0.2 if len(nouns) == 2 else 0.17
    things: list[Thing] = []
    for noun in nouns:
        for _ in range(TRIES):
            radius = rng.uniform(0.12, most)
            x, y = (rng.uniform(radius / side + MARGIN, 1 - radius / side - MARGIN) for side in aspect)
            apart = all(
                np.hypot((x - other.x) * aspect[0], (y - other.y) * aspect[1]) > GAP * 1.1 * (radius + other.radius)
                for other in things
            )
            if apart:
                things.append(Thing(noun.colour, noun.shape, x, y, radius))
                break
        else:
            return []
    return things
