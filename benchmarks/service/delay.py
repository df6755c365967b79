"""How right `est_queue_delay` of GetServerStats is: what was predicted when a job was made against how long it waited.

The engine and its worker processes are real. Jobs of random lengths come in random mixes: at once, or one after the
other with random gaps. The prediction is read right before each of them is made. What it says of an empty place, none,
is compared too. Workers without a model take the same time for a step however many jobs share it, as a GPU does with
small jobs; those of a checkpoint take longer for more, as a GPU does with large ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.cli.bench.figures import quantile
from omni_grpc.engine import Engine, Job

from .replicated import Kind, engine, submit, unended
from .report import Result

SHORT = 0.05
"""Seconds that do not count as waiting: a prepare, and a turn of the loop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An engine with so many replicas, each with so many places."""

    real: bool
    replicas: int
    places: int


CASES: Mapping[str, Case] = {
    "one that sleeps, one place": Case(real=False, replicas=1, places=1),
    "one that sleeps, four places": Case(real=False, replicas=1, places=4),
    "two that sleep, one place each": Case(real=False, replicas=2, places=1),
    "two that sleep, four places each": Case(real=False, replicas=2, places=4),
    "a real one, one place": Case(real=True, replicas=1, places=1),
    "a real one, four places": Case(real=True, replicas=1, places=4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`mixes` of each case, with `jobs` of `steps`, at least and at most; `gaps`: mean seconds between two of a mix."""

    mixes: int = 12
    jobs: tuple[int, int] = (8, 24)
    steps: tuple[int, int] = (2, 24)
    gaps: tuple[float, ...] = (0.0, 0.02, 0.1)
    size: int = 128
    seed: int = 0
    cases: tuple[str, ...] = tuple(CASES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Seconds, predicted and measured."""

    predicted: float
    measured: float


def run(checkpoint: Path) -> Result:
    return measure(checkpoint, Numbers())


def measure(checkpoint: Path, numbers: Numbers) -> Result:
    return asyncio.run(_measure(checkpoint, numbers))


async def _measure(checkpoint: Path, numbers: Numbers) -> Result:
    waits: dict[str, list[Wait]] = {}
    problems: list[str] = []
    for name in numbers.cases:
        case = CASES[name]
        kind = Kind(checkpoint=checkpoint if case.real else None, size=numbers.size, steps=numbers.steps)
        waits[name] = []
        async with engine(kind, case.replicas, case.places) as one:
            # nothing is predicted before a step was measured
            first = submit(one, kind, numbers.steps[1])
            problems += await unended([first])
            chance = random.Random(numbers.seed)
            for number in range(numbers.mixes):
                gap = numbers.gaps[number % len(numbers.gaps)]
                problems += await _mix(one, kind, numbers, gap, chance, waits[name])
    return _result(numbers, waits, problems)


async def _mix(
    one: Engine, kind: Kind, numbers: Numbers, gap: float, chance: random.Random, waits: list[Wait]
) -> list[str]:
    made: list[tuple[float, Job]] = []
    for _ in range(chance.randint(*numbers.jobs)):
        if gap:
            await asyncio.sleep(chance.expovariate(1 / gap))
        predicted = one.stats().queue_delay
        assert predicted is not None, "a step was measured"
        made.append((predicted, submit(one, kind, chance.randint(*kind.steps))))
    problems = await unended([job for _, job in made])
    for predicted, job in made:
        assert job.record.start_time is not None
        waits.append(Wait(predicted=predicted, measured=max(0.0, job.record.start_time - job.record.create_time)))
    return problems


def _result(numbers: Numbers, waits: Mapping[str, Sequence[Wait]], problems: list[str]) -> Result:
    rows, figures = [], {}
    for name, found in waits.items():
        waited = [one for one in found if one.predicted > 0 and one.measured >= SHORT]
        ratios = [one.predicted / one.measured for one in waited]
        said_none = [one for one in found if one.predicted == 0]
        right = sum(one.measured < SHORT for one in said_none)
        errors = [abs(one.predicted - one.measured) for one in waited]
        if not ratios:
            problems.append(f"{name}: no job waited")
            continue
        median, low, high = statistics.median(ratios), quantile(ratios, 0.05), quantile(ratios, 0.95)
        middle = statistics.median(one.measured for one in waited)
        rows.append(
            (
                name,
                str(len(waited)),
                f"{middle:.2f} s",
                f"{median:.2f}",
                f"{low:.2f}",
                f"{high:.2f}",
                f"{right} of {len(said_none)}",
            )
        )
        figures[name] = {
            "jobs": len(found),
            "waited": len(waited),
            "measured_median": middle,
            "ratio": {"median": median, "p5": low, "p95": high},
            "error_seconds_median": statistics.median(errors),
            "none_predicted": len(said_none),
            "none_waited": right,
        }
    about: dict[str, Any] = {"numbers": dataclasses.asdict(numbers), "cases": figures}
    return Result(
        columns=(
            *("worker", "jobs that waited", "wait, median"),
            *("predicted over measured, median", "p5", "p95", "no wait predicted, and none"),
        ),
        rows=rows,
        figures=about,
        problems=problems,
    )
