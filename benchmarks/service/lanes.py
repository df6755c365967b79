"""Do the steps of a job wait for the encode or the decode of another? Each has a lane of its own in the worker."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from omni_grpc.cli.bench.figures import quantile
from omni_grpc.client import Client, ImageOptions
from omni_grpc.v1.event_pb2 import JobEvent

from .arrivals import STEP, log
from .report import Result, spread
from .server import PATIENCE, Server, served

PROMPT = "a red circle "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other:
    """A job that comes while another runs, `count` times one after the other, and the events around what it is for."""

    begin: str
    end: str
    size: int
    prompt_repeats: int = 1
    count: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    rounds: int = 4
    size: int = 256
    steps: int = 200
    others: Mapping[str, Other] = dataclasses.field(
        default_factory=lambda: {
            # the longest prompt that a server takes unless it is told otherwise: 100,000 characters
            "the longest encode": Other(begin="started", end="encode_done", size=64, prompt_repeats=7692, count=6),
            "a decode": Other(begin="decode_progress", end="artifact_ready", size=1024),
        }
    )


def run(checkpoint: Path) -> Result:
    with served(checkpoint) as server:
        return measure(server, Numbers())


def measure(server: Server, numbers: Numbers) -> Result:
    alone: list[float] = []
    beside: dict[str, list[float]] = {name: [] for name in numbers.others}
    seconds: dict[str, list[float]] = {name: [] for name in numbers.others}
    with Client(server.address) as client:
        for _ in range(numbers.rounds):
            for name, other in numbers.others.items():
                steps, logs = _round(client, numbers, other)
                for log_ in logs:
                    begin, end = (
                        _at(next(event for event in log_ if event.HasField(kind))) for kind in (other.begin, other.end)
                    )
                    beside[name] += [later - earlier for earlier, later in steps if begin <= earlier and later <= end]
                    seconds[name].append(end - begin)
                # before the first one came, and so before its own step joined in
                alone += [later - earlier for earlier, later in steps if later < _at(logs[0][0])]
    return _result(alone, beside, seconds)


def _round(
    client: Client, numbers: Numbers, other: Other
) -> tuple[Sequence[tuple[float, float]], list[list[JobEvent]]]:
    """The times of each two consecutive steps of the running job, and the logs of the others."""
    running = client.create_job(
        "a blue square", width=numbers.size, height=numbers.size, steps=numbers.steps, negative_prompt="", seed=1
    )
    for event in client.watch_job(running.job_id, timeout=PATIENCE):
        if event.HasField(STEP) and event.step_progress.step >= numbers.steps // 8:
            break
    prompt = PROMPT * other.prompt_repeats
    options = ImageOptions(width=other.size, height=other.size, steps=1, seed=2, priority=10)
    logs = [log(client, client.create_job(prompt, **options).job_id) for _ in range(other.count)]
    times = [_at(event) for event in log(client, running.job_id) if event.HasField(STEP)]
    return list(itertools.pairwise(times)), logs


def _at(event: JobEvent) -> float:
    return event.time.ToNanoseconds() / 1e9


def _result(alone: list[float], beside: Mapping[str, list[float]], seconds: Mapping[str, list[float]]) -> Result:
    steps = {"nothing": alone, **beside}
    figures = {
        name: {
            "steps": len(its),
            "p50_ms": 1000 * quantile(its, 0.5),
            "p99_ms": 1000 * quantile(its, 0.99),
            "other_seconds": seconds.get(name, []),
        }
        for name, its in steps.items()
        if its
    }
    rows = []
    for name, found in figures.items():
        took = spread(seconds[name], "s", 2) if name in seconds else "-"
        rows.append((name, took, str(found["steps"]), f"{found['p50_ms']:.2f} ms", f"{found['p99_ms']:.2f} ms"))
    return Result(
        columns=("another job does", "which takes", "steps meanwhile", "step p50", "step p99"),
        rows=rows,
        figures=figures,
        problems=[f"no step ended during {name}: it was waited for" for name, its in beside.items() if not its],
    )
