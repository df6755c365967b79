"""A rank of a model dies, or stops without dying, among the steps of a running job: how long until a job is finished
again.

Each time the running job has to fail as retryable, and a job that is made as soon as it has failed, which is when a
client would send it again, has to succeed. A rank that is stopped by SIGSTOP is found by `--worker-timeout`, here 5 s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from omni_grpc.client import Client
from omni_grpc.v1.event_pb2 import JobEvent
from omni_grpc.v1.job_pb2 import Job
from omni_grpc.wire import from_status

from .arrivals import STEP
from .report import Result, spread
from .server import Server, served

RANKS = 2
WORKER_TIMEOUT = 5.0
PATIENCE = 300.0
"""Seconds in which a job has to end. Ranks import and load anew before the next one, on cores that others may want."""
FLAGS = (
    *("--ulysses-degree", str(RANKS), "--worker-timeout", f"{WORKER_TIMEOUT:g}", "--rank-timeout", "5"),
    *("--warm-up-seconds", "0", "--device", "cpu"),
)
LOST = {signal.SIGKILL: "WORKER_DIED", signal.SIGSTOP: "WORKER_HUNG"}
"""What a running job fails with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    rounds: int = 2
    signals: Sequence[signal.Signals] = tuple(LOST)
    steps: int = 200
    """Of the job that is running. They have to take longer than it takes to lose a rank after the first one."""
    size: int = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """One loss of a rank, and what came of it. Times are in seconds from the signal."""

    rank: int
    signal: str
    reason: str
    retryable: bool
    failed: float
    """The running job."""
    next_outcome: str
    next_step: float
    """The first step of the next job."""
    next_finished: float


def run(checkpoint: Path) -> Result:
    return measured(checkpoint, Numbers())


def measured(checkpoint: Path, numbers: Numbers) -> Result:
    with served(checkpoint, *FLAGS) as server:
        return measure(server, numbers)


def measure(server: Server, numbers: Numbers) -> Result:
    """The order is that of a server's life: the backoff of restarts starts anew with each group that became ready."""
    with Client(server.address) as client:
        losses = [
            lose(server, client, rank, number, numbers)
            for _ in range(numbers.rounds)
            for number in numbers.signals
            for rank in range(RANKS)
        ]
    return _result(numbers, losses)


def lose(server: Server, client: Client, rank: int, number: signal.Signals, numbers: Numbers) -> Loss:
    """Sends a signal to a rank among the steps of a job, and asks for the next one when that has ended."""
    edge = numbers.size
    job = client.create_job("a red circle", width=edge, height=edge, steps=numbers.steps, seed=1)
    with contextlib.closing(client.watch_job(job.job_id, timeout=PATIENCE)) as stream:
        next(event for event in stream if event.HasField(STEP))
    process = server.workers()[rank]
    began = time.time()
    os.kill(process, number)
    failed = _log(client, job)[-1]
    after = _log(client, client.create_job("a blue square", width=edge, height=edge, steps=4, seed=2))
    steps = [_at(event) - began for event in after if event.HasField(STEP)]
    return Loss(
        rank=rank,
        signal=number.name,
        reason=from_status(failed.failed.status).reason if failed.HasField("failed") else "",
        retryable=failed.failed.retryable,
        failed=_at(failed) - began,
        next_outcome=after[-1].WhichOneof("event") or "",
        next_step=steps[0] if steps else float("nan"),
        next_finished=_at(after[-1]) - began,
    )


def _log(client: Client, job: Job) -> list[JobEvent]:
    return list(client.watch_job(job.job_id, timeout=PATIENCE))


def _at(event: JobEvent) -> float:
    return event.time.ToNanoseconds() / 1e9


def _result(numbers: Numbers, losses: list[Loss]) -> Result:
    rows, problems = [], []
    for number in numbers.signals:
        expected = LOST[number]
        for rank in range(RANKS):
            these = [loss for loss in losses if (loss.signal, loss.rank) == (number.name, rank)]
            rows.append(
                (
                    f"{number.name} of rank {rank}",
                    spread([loss.failed for loss in these], "s", 2),
                    spread([loss.next_step for loss in these], "s", 2),
                    spread([loss.next_finished for loss in these], "s", 2),
                )
            )
            for loss in these:
                what = f"{number.name} of rank {rank}"
                if not (loss.retryable and loss.reason == expected):
                    problems.append(f"{what}: the running job ended with {loss.reason}, retryable: {loss.retryable}")
                if loss.next_outcome != "completed":
                    problems.append(f"{what}: the next job ended with {loss.next_outcome}")
    return Result(
        columns=("what", "running job failed", "next job's first step", "next job finished"),
        rows=rows,
        figures={
            "numbers": dataclasses.asdict(numbers) | {"signals": [number.name for number in numbers.signals]},
            "flags": " ".join(FLAGS),
            "losses": [dataclasses.asdict(loss) for loss in losses],
        },
        problems=problems,
    )
