"""The rounds of a fault, and the table of all."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..lives import FSYNC, POSTGRESQL, QUICK, REAL
from ..report import Result
from . import of_clients, of_clocks, of_processes, of_stores
from .checker import Checker, holds, left_behind, recovered
from .crowd import Crowd
from .fault import Fault
from .of_stores import own_database
from .stage import Setting, Stage, folder

FAULTS: Mapping[str, Fault] = {
    fault.name: fault for fault in (*of_processes.FAULTS, *of_stores.FAULTS, *of_clocks.FAULTS, *of_clients.FAULTS)
}

LOADING = 60.0
"""Seconds more that a worker with a model gets to load it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`only`: names of faults; none: all. `seconds`: how long each lasts, where that is not its own business."""

    rounds: int = 3
    only: Sequence[str] = ()
    stores: Sequence[str] = ()
    seconds: float | None = None
    worker: str = QUICK
    clients: int = 5
    waiting: int = 8
    steps: tuple[int, int] = (2, 40)
    seed: int = 0


@dataclasses.dataclass
class Found:
    """Of one fault with one store. `recovered`: seconds from its end until a new job was taken and done."""

    fault: Fault
    store: str
    rounds: int = 0
    jobs: int = 0
    lost: int = 0
    broken: int = 0
    recovered: list[float] = dataclasses.field(default_factory=list)
    ends: Mapping[str, int] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    skipped: str = ""

    def row(self) -> tuple[str, ...]:
        if self.skipped:
            return (self.fault.name, self.store, "0", "-", "-", f"not tried: {self.skipped}")
        times = (
            f"{statistics.median(self.recovered):.1f} (at most {max(self.recovered):.1f})" if self.recovered else "-"
        )
        return (self.fault.name, self.store, str(self.rounds), str(self.jobs), str(self.lost), times)


def measure(numbers: Numbers) -> Result:
    found = []
    for name, fault in FAULTS.items():
        if numbers.only and name not in numbers.only:
            continue
        for store in fault.stores:
            if not numbers.stores or store in numbers.stores:
                found.append(strike(fault, store, numbers))
                print(f"{' | '.join(found[-1].row())}", flush=True)
                for problem in found[-1].problems:
                    print(f"PROBLEM: {problem}", flush=True)
    return result(numbers, found)


def strike(fault: Fault, store: str, numbers: Numbers) -> Found:
    """The rounds of one fault with one store."""
    found = Found(fault, store)
    found.skipped = fault.lacks()
    if found.skipped:
        return found
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(folder())
        setting = Setting(store=store, folder=place / "state", worker=numbers.worker)
        setting.folder.mkdir()
        tools = stack.enter_context(fault.around(setting))
        if store == POSTGRESQL and not setting.state_url:
            stack.enter_context(own_database(setting))
        stage = Stage(setting, place / "log", numbers.seed)
        stack.callback(stage.close)
        try:
            stage.start()
            _rounds(stage, tools, found, numbers)
            found.problems += stage.stop()
            for life in stage.lives:
                found.problems += left_behind(life)
        except Exception as error:  # noqa: BLE001 - what was found until then is told with it
            found.problems.append(f"ended in round {found.rounds + 1} with {type(error).__name__}: {error}")
        found.problems[:0] = dict.fromkeys(stage.ledger.problems)
        if found.problems:
            said = stage.log.read_text().splitlines()
            print("\n".join(line for line in said if " INFO " not in line)[-6000:], flush=True)
    return found


def _rounds(stage: Stage, tools: Any, found: Found, numbers: Numbers) -> None:
    fault, checker = found.fault, Checker(stage)
    within = fault.within + (LOADING if numbers.worker == REAL else 0.0)
    if recovered(stage, 30) is None:
        raise RuntimeError("the server does no job")
    checker.check(holds(stage))
    before = holds(stage)
    for number in range(numbers.rounds):
        crowd = Crowd(
            stage.address,
            stage.ledger,
            model=stage.model,
            clients=numbers.clients,
            waiting=numbers.waiting,
            steps=numbers.steps,
            seed=numbers.seed + number,
            also=fault.also,
        )
        with crowd.at_work():
            time.sleep(stage.chance.uniform(0.3, 1.0))
            fault.strike(stage, tools, fault.seconds if numbers.seconds is None else numbers.seconds)
            seconds = recovered(stage, within)
            time.sleep(0.3)
        if seconds is None:
            stage.ledger.report(f"no new job is done within {within:g} s of round {number + 1}")
        else:
            found.recovered.append(seconds)
        if fault.harmless and crowd.broken:
            stage.ledger.report(f"{crowd.broken} calls of other clients broke in round {number + 1}")
        found.broken += crowd.broken
        checker.check(before)
        found.rounds, found.jobs, found.lost, found.ends = number + 1, checker.jobs, checker.lost, checker.ends
        if before.pid != stage.life.pid:
            before = holds(stage)


def result(numbers: Numbers, found: Sequence[Found]) -> Result:
    return Result(
        columns=("fault", "store", "rounds", "jobs", "lost", "recovered in s"),
        rows=[one.row() for one in found],
        figures={
            "numbers": dataclasses.asdict(numbers),
            "fsync": FSYNC,
            "faults": [
                {
                    "fault": one.fault.name,
                    "what": one.fault.what,
                    "store": one.store,
                    "rounds": one.rounds,
                    "jobs": one.jobs,
                    "ends": one.ends,
                    "lost": one.lost,
                    "calls_that_broke": one.broken,
                    "recovered_seconds": one.recovered,
                    "not_tried": one.skipped,
                }
                for one in found
            ],
        },
        problems=[f"{one.fault.name} ({one.store}): {problem}" for one in found for problem in one.problems][:100],
    )
