"""Three models in one server whose memory budget holds two: what a swap takes, and how fairly they share.

The server, its three workers and their checkpoint are real; one checkpoint has three names. First jobs come one after
the other, each for the model that has slept for longest, so that each needs a swap: from the job's creation to its
start, which is when its model is awake. Then clients ask for all three without pause. Both are done on a server too
whose budget holds all three, and on one that does not warm models up.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import random
import re
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_grpc.cli.bench.figures import quantile
from omni_grpc.client import Client, ImageOptions
from omni_grpc.config.fleet import GIB
from omni_grpc.types.errors import OmniError
from omni_grpc.v1 import admin_pb2, event_pb2, job_pb2, model_pb2

from . import clients, replicated
from .report import Result, spread
from .server import PATIENCE, Server, served

NAMES = ("a", "b", "c")
CASES = {
    "a budget for two": (2.5, "0.5"),
    "... without warm-up": (2.5, "0"),
    "a budget for three": (3.5, "0.5"),
}
"""How many models the budget holds, of which whole ones fit, and --warm-up-seconds, which pass at each wake."""
WOKEN = re.compile(r"model \w+ is awake after ([\d.]+) s")
LEAST_EVEN = 0.75
"""Of wake time, the least that one model has over the most, where three take turns."""
ENOUGH_TURNS = 12
"""Fewer wakes than these say nothing of fairness."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`turn`: --model-turn in seconds. Jobs of the long load have `steps`, at least and at most."""

    swaps: int = 45
    seconds: float = 60.0
    turn: float = 2.0
    clients: int = 2
    """Of each model."""
    size: int = 128
    steps: tuple[int, int] = (4, 12)
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """A job that has ended. Times in Unix seconds of the server."""

    model: str
    created: float
    started: float
    ended: float
    succeeded: bool

    @property
    def waited(self) -> float:
        return self.started - self.created


@dataclasses.dataclass
class Found:
    """Of one server. `asleep`: how many of the swap jobs came for a model that slept; `awake`: share of looks at which
    a model was awake; `woken_alone`, `woken`: seconds that the server took to wake a model, by its log, without and
    under load.
    """

    swaps: list[Done] = dataclasses.field(default_factory=list)
    asleep: int = 0
    load: list[Done] = dataclasses.field(default_factory=list)
    awake: dict[str, float] = dataclasses.field(default_factory=dict)
    woken_alone: list[float] = dataclasses.field(default_factory=list)
    woken: list[float] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)

    def waits(self, model: str = "") -> list[float]:
        return [done.waited for done in self.load if model in ("", done.model)]


def run(checkpoint: Path) -> Result:
    return measure(checkpoint, Numbers())


def measure(checkpoint: Path, numbers: Numbers) -> Result:
    size = asyncio.run(_bytes_of(checkpoint))
    found = {}
    for name, (held, warm_up) in CASES.items():
        flags = [flag for other in NAMES[1:] for flag in ("--model", f"{other}={checkpoint}")]
        flags += ["--device", "cpu", "--cpu-threads", "1", "--max-num-seqs", "4", "--warm-up-seconds", warm_up]
        flags += ["--model-turn", f"{numbers.turn:g}", "--gpu-memory-budget", f"{held * size / GIB:.9f}"]
        with served(f"{NAMES[0]}={checkpoint}", *flags) as server:
            found[name] = _measure(server, numbers)
    return _result(numbers, size, found)


async def _bytes_of(checkpoint: Path) -> int:
    """The weights of the checkpoint in memory, as a worker measures them."""
    async with replicated.engine(replicated.Kind(checkpoint=checkpoint), 1, 1) as engine:
        return engine.device_bytes


def _measure(server: Server, numbers: Numbers) -> Found:
    found = Found()
    with Client(server.address) as client:
        for model in NAMES:
            _job(client, model, numbers, numbers.steps[0])  # pays for what is made at first use
        first = len(_woken(server))
        for number in range(numbers.swaps):
            model = NAMES[number % len(NAMES)]
            found.asleep += model not in _awake(server)
            found.swaps.append(_job(client, model, numbers, numbers.steps[0]))
    found.woken_alone = _woken(server)[first:]
    _load(server, numbers, found)
    found.woken = _woken(server)[first + len(found.woken_alone) :]
    if without := [model for model in NAMES if not found.waits(model)]:
        raise RuntimeError(f"no job of {', '.join(without)} has ended: {'; '.join(found.errors)}")
    return found


def _woken(server: Server) -> list[float]:
    return [float(seconds) for seconds in WOKEN.findall(server.logged())]


def _job(client: Client, model: str, numbers: Numbers, steps: int) -> Done:
    """Makes a job and waits for its end."""
    options = ImageOptions(width=numbers.size, height=numbers.size, steps=steps, seed=1, output_format="RAW_RGB8")
    job: job_pb2.Job = client.create_job("a red circle", model=model, **options)
    for _ in client.watch_job(job.job_id, timeout=PATIENCE):
        pass
    job = client.get_job(job.job_id)
    return Done(
        model=model,
        created=job.create_time.ToNanoseconds() / 1e9,
        started=job.start_time.ToNanoseconds() / 1e9,
        ended=job.end_time.ToNanoseconds() / 1e9,
        succeeded=job.state == event_pb2.JOB_STATE_SUCCEEDED,
    )


def _awake(server: Server, client: clients.Client | None = None) -> set[str]:
    asked = client or clients.Client(server.address)
    try:
        stats = asked.admin.GetServerStats(admin_pb2.GetServerStatsRequest(), timeout=PATIENCE).stats
    finally:
        if client is None:
            asked.close()
    return {one.model for one in stats.models if one.state == model_pb2.MODEL_STATE_READY}


def _load(server: Server, numbers: Numbers, found: Found) -> None:
    """All models are asked without pause."""
    over, lock = threading.Event(), threading.Lock()

    def ask(model: str, seed: int) -> None:
        chance = random.Random(seed)
        with Client(server.address) as client:
            while not over.is_set():
                try:
                    done = _job(client, model, numbers, chance.randint(*numbers.steps))
                except OmniError as error:
                    with lock:
                        found.errors.append(f"{model}: {error}")
                    return
                with lock:
                    found.load.append(done)

    threads = [
        threading.Thread(target=ask, args=(model, numbers.seed + 100 * number + place))
        for place, model in enumerate(NAMES)
        for number in range(numbers.clients)
    ]
    for thread in threads:
        thread.start()
    looks: collections.Counter[str] = collections.Counter()
    client, end = clients.Client(server.address), time.monotonic() + numbers.seconds
    for count in itertools.count(1):
        looks.update(_awake(server, client))
        time.sleep(0.1)
        if time.monotonic() >= end:
            found.awake = {model: looks[model] / count for model in NAMES}
            break
    client.close()
    over.set()
    for thread in threads:
        thread.join(2 * PATIENCE)


# --- the report -------------------------------------------------------------------------------------------------------


def _problems(numbers: Numbers, found: Found, *, turns: bool) -> list[str]:
    done = [*found.swaps, *found.load]
    problems = [*found.errors, *(f"a job of {one.model} failed" for one in done if not one.succeeded)]
    # as tests/fleet/test_turns.py: the turns of those before it, each of which ends what it runs and moves
    longest_job = max(one.ended - one.started for one in found.load)
    longest_swap = max([*found.woken, *(one.waited for one in found.swaps)])
    bound = len(NAMES) * (numbers.turn + longest_job + longest_swap)
    if (longest := max(found.waits())) > bound:
        problems.append(f"a job waited for {longest:.1f} s, longer than all turns ({bound:.1f} s)")
    if turns and found.asleep < len(found.swaps):
        problems.append(f"only {found.asleep} of {len(found.swaps)} jobs came for a model that slept")
    even = min(found.awake.values()) / max(found.awake.values())
    if turns and len(found.woken) >= ENOUGH_TURNS and even < LEAST_EVEN:
        problems.append(f"the model that was awake least had {even:.2f} of the wake time of another")
    return problems


def _result(numbers: Numbers, size: int, found: dict[str, Found]) -> Result:
    columns = [_column(numbers, one) for one in found.values()]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    problems = [
        f"{name}: {problem}"
        for name, one in found.items()
        for problem in _problems(numbers, one, turns=CASES[name][0] < len(NAMES))
    ]
    return Result(
        columns=("what", *found),
        rows=rows,
        figures={
            "numbers": dataclasses.asdict(numbers),
            "bytes_of_a_model": size,
            "cases": {name: _figures(numbers, one) for name, one in found.items()},
        },
        problems=problems,
    )


def _column(numbers: Numbers, found: Found) -> dict[str, str]:
    waits = [one.waited for one in found.swaps]
    jobs = collections.Counter(one.model for one in found.load)
    failed = sum(not one.succeeded for one in (*found.swaps, *found.load)) + len(found.errors)
    share = {model: found.awake[model] / sum(found.awake.values()) for model in NAMES}
    return {
        "jobs one at a time": str(len(found.swaps)),
        "... that came for a model that slept": str(found.asleep),
        "... creation to start, median": _ms(statistics.median(waits)),
        "... p95": _ms(quantile(waits, 0.95)),
        "... of which the server took to wake the model": spread(found.woken_alone, "s", 2)
        if found.woken_alone
        else "",
        "all asked without pause": f"{numbers.seconds:g} s",
        "... jobs per second": f"{len(found.load) / numbers.seconds:.1f}",
        "... jobs by model": _listed([str(jobs[model]) for model in NAMES]),
        "... share of wake time by model": _listed([f"{share[model]:.2f}" for model in NAMES]),
        "... models woken": str(len(found.woken)),
        "... wait of a job, by model, p95": _listed(
            [f"{quantile(found.waits(model), 0.95):.2f}" for model in NAMES], "s"
        ),
        "... longest wait of a job": f"{max(found.waits()):.2f} s",
        "jobs that failed or were refused": str(failed),
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _listed(texts: Sequence[str], unit: str = "") -> str:
    return ", ".join(texts) + (unit and f" {unit}")


def _figures(numbers: Numbers, found: Found) -> dict[str, Any]:
    waits = [one.waited for one in found.swaps]
    return {
        "swap_seconds": {"median": statistics.median(waits), "p95": quantile(waits, 0.95), "all": waits},
        "asleep": found.asleep,
        "wake_seconds": found.woken_alone,
        "wake_seconds_under_load": found.woken,
        "load": {
            model: {
                "jobs": len(found.waits(model)),
                "awake": found.awake[model],
                "wait_median": statistics.median(found.waits(model)),
                "wait_p95": quantile(found.waits(model), 0.95),
                "wait_longest": max(found.waits(model)),
            }
            for model in NAMES
        },
        "failed": sum(not one.succeeded for one in (*found.swaps, *found.load)),
        "errors": found.errors,
    }
