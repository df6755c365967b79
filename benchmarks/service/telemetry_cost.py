"""What metrics and log lines cost: for each kind of event, and for a step with all that belongs to it.

The engine runs in this process, with the bundled model. Its jobs are taken in turns with and without observers; what
the loop's thread computes for a step is compared, by its own CPU time, so that other programs do not count. Then what
was observed in one run is told again, many times, to time each kind of event by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import BUNDLED, EngineConfig
from omni_grpc.engine import Engine, Job, LocalExecutor, Submission
from omni_grpc.engine.items import Item
from omni_grpc.engine.replica import Replica
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate, Update
from omni_grpc.server.calls import Calls
from omni_grpc.server.server import served_methods, unserved_methods
from omni_grpc.telemetry.metrics import Metrics
from omni_grpc.types.caller import Caller
from omni_grpc.types.plan import Report, Stepped
from omni_grpc.types.request import Draft

from .report import Result
from .server import PATIENCE

GOAL_US = 3.0
"""Microseconds of one event, at most."""
GOAL_SHARE = 0.01
"""Of the time of a step, at most."""
TIMES = 20_000
METHOD = "JobService/CreateJob"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    rounds: int = 16
    running: int = 8
    steps: int = 20
    size: int = 64
    times: int = TIMES


@dataclasses.dataclass
class Bench:
    """An engine with a gate and metrics, without a port."""

    engine: Engine
    gate: Gate
    calls: Calls
    metrics: Metrics
    reports: list[tuple[Report, Mapping[str, Item]]] = dataclasses.field(default_factory=list)
    """With what the engine knew of the requests then."""
    updates: list[Update] = dataclasses.field(default_factory=list)
    jobs: list[Job] = dataclasses.field(default_factory=list)

    @property
    def observers(self) -> list[list[Callable[..., None]]]:
        """Every list of observers."""
        engine, gate = self.engine, self.gate
        return [engine.on_report, engine.on_stored, engine.on_restart, gate.fleet.on_end, gate.jobs.on_update]

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        kept = [list(observers) for observers in self.observers]
        for observers in self.observers:
            observers.clear()
        # whoever keeps the quotas observes ends too, with or without metrics
        self.gate.fleet.on_end.extend(kept[3][:-1])
        try:
            yield
        finally:
            for observers, before in zip(self.observers, kept, strict=True):
                observers[:] = before


def run(checkpoint: Path) -> Result:
    return asyncio.run(measure(Numbers()))


async def measure(numbers: Numbers) -> Result:
    checkpoint = open_checkpoint(str(BUNDLED))
    config = EngineConfig.from_settings(
        model=str(BUNDLED), max_num_seqs=numbers.running, warm_up_seconds=0, device="cpu", metrics_port=0
    )
    engine = Engine(config, checkpoint, LocalExecutor(config, checkpoint))
    gate = Gate(Fleet.of(engine))
    calls = Calls(gate, served_methods(), unserved_methods())
    bench = Bench(engine, gate, calls, Metrics(gate, calls, config.metrics))
    await engine.start()
    try:
        await _work(bench, numbers)  # pays for what is made at first use
        on, off = [], []
        for number in range(numbers.rounds):
            # whoever goes first changes with each round
            for observed in (True, False) if number % 2 else (False, True):
                with contextlib.nullcontext() if observed else bench.unobserved():
                    (on if observed else off).append(await _work(bench, numbers))
        _observe(bench)
        await _work(bench, numbers)
        events = _events(bench, numbers)
        read, whole = await _scrapes(bench)
    finally:
        await engine.close()
    return _result(numbers, on, off, events, read, whole)


@dataclasses.dataclass(frozen=True)
class Worked:
    """Microseconds of a forward: what the loop's thread computed for it, and how long it took in the worker."""

    loop: float
    step: float


async def _work(bench: Bench, numbers: Numbers) -> Worked:
    """Some jobs at once, each with a watcher."""
    elapsed: list[float] = []

    def stepped(replica: Replica, report: Report) -> None:
        if isinstance(report, Stepped):
            elapsed.append(report.elapsed)

    bench.engine.on_report.append(stepped)
    began = time.thread_time()
    drafts = [_draft(bench.engine, numbers, seed) for seed in range(numbers.running)]
    jobs = [bench.engine.submit(Submission(draft=draft))[0] for draft in drafts]
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(_watched(bench, job) for job in jobs))
    spent = time.thread_time() - began
    bench.engine.on_report.remove(stepped)
    return Worked(1e6 * spent / len(elapsed), 1e6 * statistics.median(elapsed))


async def _watched(bench: Bench, job: Job) -> None:
    async with aclosing(bench.gate.jobs.watch(Caller(), job.id)) as updates:
        async for _ in updates:
            pass


def _draft(engine: Engine, numbers: Numbers, seed: int) -> Draft:
    return Draft(
        model=engine.checkpoint.name,
        prompt="a red circle",
        width=numbers.size,
        height=numbers.size,
        steps=numbers.steps,
        seeds=(seed,),
    )


def _observe(bench: Bench) -> None:
    """Keeps what is told, for telling it again."""

    def reported(replica: Replica, report: Report) -> None:
        known = {job_id: bench.engine.held(job_id) for job_id in replica.meter.planned_for}
        bench.reports.append((report, {job_id: item for job_id, item in known.items() if item is not None}))

    bench.engine.on_report.append(reported)
    bench.gate.jobs.on_update.append(lambda update, seconds: bench.updates.append(update))
    bench.gate.fleet.on_end.append(bench.jobs.append)


def _events(bench: Bench, numbers: Numbers) -> dict[str, float]:
    """Microseconds of each kind of event, told again and again."""
    engine, gate = bench.engine, bench.gate
    (replica,) = engine.replicas
    report, update, end = engine.on_report[0], gate.jobs.on_update[0], gate.fleet.on_end[-2]
    steps = [(one, known) for one, known in bench.reports if isinstance(one, Stepped)]
    shared, held = max(steps, key=lambda step: len(step[0].progress))
    # they have ended since
    engine.held = held.get  # type: ignore[method-assign,assignment]
    update_told, job = bench.updates[len(bench.updates) // 2], bench.jobs[-1]
    replica.meter.planned_for = tuple(progress.id for progress in shared.progress)
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.Logger("omni_grpc.server.calls")
    logger.addHandler(handler)
    kinds: dict[str, Callable[[], object]] = {
        f"a forward of {len(shared.progress)} requests": lambda: report(replica, shared),
        "an event that a watcher gets": lambda: update(update_told, 0.0004),
        "a call that ends": lambda: bench.calls.observers[0]("grpc", METHOD, "OK", "", 0.0123),
        "a job that ends": lambda: end(job),
        "a log line of a call": lambda: logger.info("%s %s in %.3f s", METHOD, "OK", 0.0123),
    }
    return {name: _microseconds(call, numbers.times) for name, call in kinds.items()}


def _microseconds(call: Callable[[], object], times: int) -> float:
    """The best of five means: the others were held up."""
    means = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(times // 5):
            call()
        means.append(1e6 * (time.thread_time() - began) / (times // 5))
    return min(means)


async def _scrapes(bench: Bench) -> tuple[float, float]:
    """Milliseconds of a scrape: of the loop's own thread, and until the text is there."""
    own, whole = [], []
    for _ in range(20):
        thread, began = time.thread_time(), time.perf_counter()
        await bench.metrics.text()
        own.append(1000 * (time.thread_time() - thread))
        whole.append(1000 * (time.perf_counter() - began))
    return statistics.median(own), statistics.median(whole)


def _result(
    numbers: Numbers,
    on: Sequence[Worked],
    off: Sequence[Worked],
    events: dict[str, float],
    read: float,
    whole: float,
) -> Result:
    loop_on, loop_off = (statistics.median(one.loop for one in side) for side in (on, off))
    apart = [one.loop - other.loop for one, other in zip(on, off, strict=True)]
    low, middle, high = statistics.quantiles(apart, n=4)
    step = statistics.median(one.step for one in (*on, *off))
    forward = next(iter(events.values()))
    share = forward / step
    each = forward / numbers.running
    metered = [each, *(cost for name, cost in events.items() if "forward" not in name and "log" not in name)]
    rows = [
        *((name, f"{cost:.2f} us") for name, cost in events.items()),
        ("the same forward, for each request", f"{each:.2f} us"),
        ("the same forward, of its own time", f"{share:.3%}"),
        ("all that the loop computes for a forward and its watchers, with metrics", f"{loop_on:.0f} us"),
        ("the same without", f"{loop_off:.0f} us"),
        ("the difference, median of the rounds and half of them", f"{middle:.0f} us ({low:.0f} to {high:.0f})"),
        ("a scrape, on the loop", f"{read:.2f} ms"),
        ("a scrape, until its text is there", f"{whole:.1f} ms"),
    ]
    figures = {
        **dataclasses.asdict(numbers),
        "event_us": events,
        "forward_us_of_each_request": each,
        "forward_share": share,
        "goals_kept": {"event": max(metered) <= GOAL_US, "share": share <= GOAL_SHARE},
        "loop_us": {"on": [one.loop for one in on], "off": [one.loop for one in off]},
        "loop_us_median": {"on": loop_on, "off": loop_off},
        "loop_us_apart": {"median": middle, "quartiles": [low, high]},
        "step_us_median": step,
        "scrape_ms": {"loop": read, "whole": whole},
    }
    return Result(columns=("what", "cost"), rows=rows, figures=figures)
