"""When requests arrive in an open loop, where none waits for those before it. Times are seconds from the beginning."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
from collections.abc import Iterator

CONSTANT, POISSON, BURSTS = "constant", "poisson", "bursts"
KINDS = (POISSON, CONSTANT, BURSTS)


@dataclasses.dataclass(frozen=True, slots=True)
class Bursts:
    """`on` seconds with requests, then `off` seconds without any, again and again."""

    on: float
    off: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """How requests arrive; at which rate is said later, since a search tries several."""

    kind: str = POISSON
    bursts: Bursts = Bursts(5.0, 15.0)

    def times(self, rate: float, seconds: float | None, most: int | None, seed: int) -> list[float]:
        """The arrivals of a run at a mean `rate` per second: those before `seconds`, and at most `most` of them."""
        chance = random.Random(seed)
        endless = {CONSTANT: self._constant, POISSON: self._poisson, BURSTS: self._bursts}[self.kind](rate, chance)
        inside = endless if seconds is None else itertools.takewhile(lambda time: time < seconds, endless)
        return list(itertools.islice(inside, most))

    @staticmethod
    def _constant(rate: float, chance: random.Random) -> Iterator[float]:
        return (number / rate for number in itertools.count())

    @staticmethod
    def _poisson(rate: float, chance: random.Random) -> Iterator[float]:
        time = 0.0
        while True:
            time += chance.expovariate(rate)
            yield time

    def _bursts(self, rate: float, chance: random.Random) -> Iterator[float]:
        """Poisson within the bursts, faster by as much as makes `rate` the mean with the pauses."""
        on, period = self.bursts.on, self.bursts.on + self.bursts.off
        for busy in self._poisson(rate * period / on, chance):
            number, rest = divmod(busy, on)
            yield number * period + rest


def bursts(text: str) -> Bursts:
    """The type of --bursts: ON/OFF in seconds."""
    try:
        on, off = (float(part) for part in text.split("/"))
    except ValueError:
        on = off = -1.0
    if not (0 < on < float("inf") and 0 <= off < float("inf")):
        raise argparse.ArgumentTypeError(f"{text!r} is not ON/OFF in seconds, for example 5/15")
    return Bursts(on, off)
