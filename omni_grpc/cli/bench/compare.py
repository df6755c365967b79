"""`python -m omni_grpc bench compare A.json B.json`: what changed between two load tests, with confidence intervals.

Requests of a run are not independent: those that wait together are late together. So what is drawn again is blocks of
requests that came one after the other (the moving-block bootstrap, Kuensch 1989), which makes the intervals wider than
those of single requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_grpc.cli.bench.serve.measures import Objectives
from omni_grpc.cli.bench.serve.record import INTERRUPTED, Record, read
from omni_grpc.cli.bench.serve.session import SCHEMA
from omni_grpc.cli.bench.serve.slo import Slo, time_of
from omni_grpc.cli.printing import print_json, print_table
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.json_text import read_json

DRAWS = 2000
TAIL = 0.025
"""The share of the draws on each side of a 95 % interval."""
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure of two runs. `change`: relative, or in shares where `share`; with its 95 % interval. `worse`: whether
    it got worse by more than the tolerance, and the interval says that it is no chance.
    """

    name: str
    before: float
    after: float
    change: float
    interval: tuple[float, float]
    share: bool
    worse: bool


def add(commands: Any) -> None:
    """Adds the command to the subparsers of `bench`."""
    parser = commands.add_parser(
        "compare",
        help="compare two load tests",
        description="Compares two files of `bench serve --json`: B against A, with 95 %% intervals.",
        epilog="Exit codes: 0 nothing got worse, 1 something did, beyond --tolerance, 2 a wrong command line.",
    )
    parser.set_defaults(run=lambda args, flags: run(args))
    parser.add_argument("before", type=Path, metavar="A.json", help="the run to compare with")
    parser.add_argument("after", type=Path, metavar="B.json", help="the run that may be worse")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.05,
        help="what a figure may get worse by, 0.05 is 5 %% (default: 0.05)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of what is drawn (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the differences and returns the exit code. Raises ConfigError for files that cannot be compared."""
    before, after = (read_run(path) for path in (args.before, args.after))
    pairs = list(_pairs(before, after, args.before, args.after))
    notes = list(_notes(before, after))
    found = {
        label: list(differences(_records(one), _records(other), _objectives(before), args.tolerance, args.seed))
        for label, one, other in pairs
    }
    worse = [f"{label}: {it.name}" for label, its in found.items() for it in its if it.worse]
    if args.json:
        print_json({"tolerance": args.tolerance, "notes": notes, "differences": _plain(found), "worse": worse})
        return 1 if worse else 0
    for note in notes:
        print(f"note: {note}")
    rows = [(label, *_cells(it)) for label, its in found.items() for it in its]
    print_table(("RUN", "FIGURE", "A", "B", "CHANGE", "95 % INTERVAL", ""), rows)
    print(f"worse beyond {args.tolerance:.0%}: {', '.join(worse) or 'nothing'}")
    return 1 if worse else 0


def read_run(path: Path) -> Mapping[str, Any]:
    """What `bench serve --json` wrote. Raises ConfigError for anything else, and for another version of the format."""
    try:
        content = read_json(path.read_bytes())
        schema = content["schema"]
    except (ValueError, TypeError, KeyError) as error:
        raise _refused(path, "is no file of `bench serve --json`") from error
    if schema != SCHEMA:
        raise _refused(path, f"has the format {schema!r}, and this version reads {SCHEMA!r} alone: run it again")
    found: Mapping[str, Any] = content
    return found


def differences(
    before: Sequence[Record], after: Sequence[Record], objectives: Objectives, tolerance: float, seed: int
) -> Iterator[Difference]:
    """Of each figure that both runs have."""
    for name, (of, statistic, sign, least) in _FIGURES.items():
        share = name in SHARES
        one, other = (of([it for it in its if it.outcome != INTERRUPTED], objectives) for its in (before, after))
        if min(len(one), len(other)) < least:
            continue
        rng = np.random.default_rng(seed)
        drawn = [statistic(_drawn(values, rng)) for values in (one, other)]
        whole = [float(statistic(values[None])[0]) for values in (one, other)]
        if not share and not whole[0] > 0:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            changes = drawn[1] - drawn[0] if share else drawn[1] / drawn[0] - 1
        change = whole[1] - whole[0] if share else whole[1] / whole[0] - 1
        low, high = (float(np.quantile(changes[np.isfinite(changes)], q)) for q in (TAIL, 1 - TAIL))
        certain = low > 0 if sign > 0 else high < 0
        yield Difference(
            name=name,
            before=whole[0],
            after=whole[1],
            change=change,
            interval=(low, high),
            share=share,
            worse=bool(certain and sign * change > tolerance),
        )


def _drawn(values: Floats, rng: np.random.Generator) -> Floats:
    """[DRAWS, n]: the values drawn again in blocks, which go on from the last value at the first."""
    count = len(values)
    length = max(1, round(count ** (1 / 3)))
    starts = rng.integers(0, count, (DRAWS, math.ceil(count / length)))
    places = (starts[..., None] + np.arange(length)) % count
    drawn: Floats = values[places.reshape(DRAWS, -1)[:, :count]]
    return drawn


# --- figures ----------------------------------------------------------------------------------------------------------

Of = Callable[[Sequence[Record], Objectives], Floats]
Statistic = Callable[[Floats], Floats]


def _time(name: str) -> Of:
    def of(records: Sequence[Record], objectives: Objectives) -> Floats:
        found = [time_of(record, name) for record in records if record.succeeded]
        return np.array([it for it in found if it is not None], np.float64)

    return of


def _percentile(q: float) -> Statistic:
    def statistic(drawn: Floats) -> Floats:
        found: Floats = np.quantile(drawn, q, axis=1, method="inverted_cdf")  # nearest rank
        return found

    return statistic


def _mean(drawn: Floats) -> Floats:
    found: Floats = drawn.mean(axis=1)
    return found


def _per_second(drawn: Floats) -> Floats:
    """From the seconds between two ends."""
    with np.errstate(divide="ignore"):
        found: Floats = 1 / drawn.mean(axis=1)
    return found


def _between_ends(records: Sequence[Record], objectives: Objectives) -> Floats:
    ends = sorted(record.ended for record in records if record.succeeded and record.ended is not None)
    return np.diff(np.array(ends, np.float64))


def _met(records: Sequence[Record], objectives: Objectives) -> Floats:
    return np.array([objectives.met(record) for record in records], np.float64)


def _failed(records: Sequence[Record], objectives: Objectives) -> Floats:
    return np.array([not record.succeeded for record in records], np.float64)


WORSE_IF_MORE, WORSE_IF_LESS = 1, -1
SHARES = ("objectives kept", "failed")
"""Figures that are shares: their difference is told, not their ratio."""
_FIGURES: Mapping[str, tuple[Of, Statistic, int, int]] = {
    "end to end, mean": (_time("e2e"), _mean, WORSE_IF_MORE, 2),
    "end to end, p50": (_time("e2e"), _percentile(0.5), WORSE_IF_MORE, 20),
    "end to end, p95": (_time("e2e"), _percentile(0.95), WORSE_IF_MORE, 20),
    "end to end, p99": (_time("e2e"), _percentile(0.99), WORSE_IF_MORE, 100),
    "first event, p95": (_time("first_event"), _percentile(0.95), WORSE_IF_MORE, 20),
    "first step, p95": (_time("first_step"), _percentile(0.95), WORSE_IF_MORE, 20),
    "longest step gap, p95": (_time("step_gap"), _percentile(0.95), WORSE_IF_MORE, 20),
    "done per second": (_between_ends, _per_second, WORSE_IF_LESS, 20),
    "objectives kept": (_met, _mean, WORSE_IF_LESS, 1),
    "failed": (_failed, _mean, WORSE_IF_MORE, 1),
}
"""Name -> what is drawn, what is made of it, when it is worse, and from how many requests on it is told: a percentile
of fewer is one of the largest.
"""


# --- files ------------------------------------------------------------------------------------------------------------


def _pairs(
    before: Mapping[str, Any], after: Mapping[str, Any], one: Path, other: Path
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """The points that both have: those at the same rate, or the only one of each."""
    first, second = ({point["label"]: point for point in run["points"]} for run in (before, after))
    shared = [label for label in first if label in second]
    if not shared:
        if len(first) == len(second) == 1:
            yield f"{next(iter(first))} and {next(iter(second))}", *first.values(), *second.values()
            return
        rates = f"{one} has {', '.join(first) or 'no points'}, {other} has {', '.join(second) or 'no points'}"
        raise ConfigError(f"the two files have no rate in common: {rates}", violations=(Violation("after", rates),))
    for label in shared:
        yield label, first[label], second[label]


def _notes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """What is not the same, and may be why figures differ."""
    for part, names in (("server", ("version", "device", "features")), ("model", ("name",)), ("client", ("cores",))):
        for name in names:
            if before[part][name] != after[part][name]:
                yield f"{part} {name}: A {_said(before[part][name])}, B {_said(after[part][name])}"
    for name, value in before["load"].items():
        if value != (other := after["load"].get(name)):
            yield f"load {name}: A {_said(value)}, B {_said(other)}"
    for label, one in (("A", before), ("B", after)):
        if one["interrupted"]:
            yield f"{label} was interrupted"


def _said(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _records(point: Mapping[str, Any]) -> list[Record]:
    return sorted((read(it) for it in point["requests"]), key=lambda record: record.scheduled)


def _objectives(run: Mapping[str, Any]) -> Objectives:
    """Those of A hold for both runs."""
    load = run["load"]
    own = {klass["name"]: Slo(klass["slo"]) for klass in load["classes"] if klass["slo"]}
    return Objectives(run=Slo(load["slo"]), classes=own)


def _cells(it: Difference) -> tuple[str, ...]:
    low, high = it.interval
    values = (f"{value:.1%}" if it.share else f"{value:.4g}" for value in (it.before, it.after))
    return (it.name, *values, f"{it.change:+.1%}", f"{low:+.1%} to {high:+.1%}", "worse" if it.worse else "")


def _plain(found: Mapping[str, Sequence[Difference]]) -> dict[str, Any]:
    return {label: [dataclasses.asdict(it) for it in its] for label, its in found.items()}


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} {why}", violations=(Violation(str(path), why),))


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value
