"""Scenes in numbers: captions as token ids and geometry as arrays, made by many processes before training begins."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omni_grpc.config.command_line import Parser
from omni_grpc.scenes.captions import say
from omni_grpc.scenes.layout import Scene, arrange
from omni_grpc.scenes.shapes import COLOURS, SHAPES
from omni_grpc.scenes.wish import Wish, draw_wish
from tools.train_demo.words import PREFIX_TOKENS, template, tokenizer

TEXT = 40
"""Tokens of a caption with the end of the template; longer ones are left out."""
THINGS = 3
BUCKETS = ((128, 128), (192, 128), (128, 192), (192, 192), (256, 192), (192, 256), (256, 256))
"""Width and height."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """Scenes of one size.

    tokens: [n, PREFIX_TOKENS + TEXT]; lengths: [n], those that count after the prefix. things: [n, THINGS, 5], colour,
    shape (-1: there is none), x, y and radius as in layout.Thing. ground: [n, 3], two colours and whether it is
    vertical.
    """

    size: tuple[int, int]
    tokens: NDArray[np.int16]
    lengths: NDArray[np.int16]
    things: NDArray[np.float32]
    ground: NDArray[np.int8]


def make(size: tuple[int, int], count: int, seed: int, processes: int) -> Pool:
    """The same arguments give the same scenes, whatever the number of processes. Held-out wishes are not among them."""
    share = 2000
    jobs = [(size, min(share, count - start), f"{seed}/{size}/{start}") for start in range(0, count, share)]
    with ProcessPoolExecutor(processes) as executor:
        parts = list(executor.map(_part, jobs))
    return Pool(size, *(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def save(pools: Sequence[Pool], folder: Path) -> None:
    """Writes pools for another machine: a scene takes some 40 bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for pool in pools:
        np.savez_compressed(
            folder / "{}x{}.npz".format(*pool.size),
            prefix=pool.tokens[0, :PREFIX_TOKENS],
            tokens=pool.tokens[:, PREFIX_TOKENS:],
            lengths=pool.lengths.astype(np.int8),
            things=pool.things.astype(np.float16),
            ground=pool.ground,
        )


def load(folder: Path, rank: int, ranks: int, share: float = 1.0) -> list[Pool]:
    """What `save` wrote, or a share of it: every scene in one rank."""
    pools = []
    for size in BUCKETS:
        with np.load(folder / "{}x{}.npz".format(*size)) as file:
            tokens, lengths, things, ground = (
                file[name][rank::ranks] for name in ("tokens", "lengths", "things", "ground")
            )
            tokens, lengths, things, ground = (
                part[: round(share * len(part))] for part in (tokens, lengths, things, ground)
            )
            prefix = np.broadcast_to(file["prefix"], (len(tokens), PREFIX_TOKENS))
        tokens = np.concatenate([prefix, tokens], 1)
        pools.append(Pool(size, tokens, lengths.astype(np.int16), things.astype(np.float32), ground))
    return pools


def numbers(scene: Scene) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """The geometry of one scene, as in Pool."""
    colours, shapes = list(COLOURS), list(SHAPES)
    things = np.full((THINGS, 5), -1, np.float32)
    for place, thing in enumerate(scene.things):
        things[place] = (colours.index(thing.colour), shapes.index(thing.shape), thing.x, thing.y, thing.radius)
    ground = scene.background
    return things, np.array(
        (colours.index(ground.colour), colours.index(ground.to or ground.colour), ground.vertical), np.int8
    )


def encode(words: object, caption: str) -> tuple[NDArray[np.int16], int] | None:
    """Token ids, padded, and how many count after the prefix; None where they do not fit."""
    ids = words(template(caption)).input_ids  # type: ignore[operator]
    if len(ids) > PREFIX_TOKENS + TEXT:
        return None
    padded = np.zeros(PREFIX_TOKENS + TEXT, np.int16)
    padded[: len(ids)] = ids
    return padded, len(ids) - PREFIX_TOKENS


def training_wish(rng: random.Random) -> Wish:
    while (wish := draw_wish(rng)).held_out:
        pass
    return wish


def _part(job: tuple[tuple[int, int], int, str]) -> tuple[NDArray[np.generic], ...]:
    size, count, seed = job
    rng, words = random.Random(seed), tokenizer()
    rows = []
    while len(rows) < count:
        wish = training_wish(rng)
        if (encoded := encode(words, say(wish, rng))) is not None:
            rows.append((*encoded, *numbers(arrange(wish, *size, rng))))
    tokens, lengths, things, ground = (np.stack(column) for column in zip(*rows, strict=True))
    return tokens, lengths.astype(np.int16), things, ground


if __name__ == "__main__":
    parser = Parser(description="Makes scenes ahead, for `run --pools FOLDER`.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--counts", type=int, nargs=len(BUCKETS), required=True, help="of 128x128, 192x128, ...")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    save([make(size, n, args.seed, args.processes) for size, n in zip(BUCKETS, args.counts, strict=True)], args.folder)
