"""The worker is killed among running jobs: who fails, who does not, and when the server takes steps again.

Two more jobs are made: one at once, while nobody may have noticed the death, and one as soon as the running jobs have
failed, which is when a client would send its request again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni_grpc.client import Client
from omni_grpc.client.channel import options_for
from omni_grpc.v1.event_pb2 import JobEvent
from omni_grpc.v1.job_pb2 import Job

from .arrivals import STEP, log
from .report import Result, spread
from .server import PATIENCE, Server, served

SERVING = health_pb2.HealthCheckResponse.SERVING
RETRYABLE = "UNAVAILABLE (retryable)"
SETTLE_SECONDS = 0.5
"""How long the jobs take steps together before the kill."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    jobs: int = 4
    rounds: int = 3
    steps: int = 200
    size: int = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill, and what came of it. Times are in seconds from the kill."""

    codes: tuple[str, ...]
    failed: float
    serving: float
    at_once: Next
    after_failure: Next


@dataclasses.dataclass(frozen=True, kw_only=True)
class Next:
    """A job made after a kill. Times are in seconds from the kill; `first_step` is None where it took none."""

    created: float
    outcome: str
    first_step: float | None


def run(checkpoint: Path) -> Result:
    with served(checkpoint, "--max-num-seqs", "8") as server:
        return measure(server, Numbers())


def measure(server: Server, numbers: Numbers) -> Result:
    with Client(server.address) as client, _health(server.address) as changes:
        return _result(numbers, [_kill(server, client, changes, numbers) for _ in range(numbers.rounds)])


def _kill(server: Server, client: Client, changes: list[tuple[float, bool]], numbers: Numbers) -> Kill:
    jobs = [
        client.create_job("a red circle", width=numbers.size, height=numbers.size, steps=numbers.steps, seed=seed)
        for seed in range(numbers.jobs)
    ]
    for job in jobs:
        with contextlib.closing(client.watch_job(job.job_id, timeout=PATIENCE)) as stream:
            next(event for event in stream if event.HasField(STEP))
    time.sleep(SETTLE_SECONDS)
    worker, seen = server.worker(), len(changes)
    killed = time.time()
    os.kill(worker, signal.SIGKILL)
    at_once = _make_next(client, numbers)
    logs = [log(client, job.job_id) for job in jobs]
    after_failure = _make_next(client, numbers)
    ends = [_next(client, job, killed) for job in (at_once, after_failure)]
    until = time.monotonic() + PATIENCE
    while not any(serving for _, serving in changes[seen:]):
        if time.monotonic() > until:
            raise TimeoutError(f"not SERVING again within {PATIENCE:.0f} s")
        time.sleep(0.02)
    return Kill(
        codes=tuple(_outcome(events[-1]) for events in logs),
        failed=max(_at(events[-1]) for events in logs) - killed,
        serving=next(at for at, serving in changes[seen:] if serving) - killed,
        at_once=ends[0],
        after_failure=ends[1],
    )


def _make_next(client: Client, numbers: Numbers) -> Job:
    return client.create_job("a blue square", width=numbers.size, height=numbers.size, steps=4, seed=9)


def _next(client: Client, job: Job, killed: float) -> Next:
    events = log(client, job.job_id)
    return Next(
        created=job.create_time.ToNanoseconds() / 1e9 - killed,
        outcome=_outcome(events[-1]),
        first_step=next((_at(event) - killed for event in events if event.HasField(STEP)), None),
    )


@contextlib.contextmanager
def _health(address: str) -> Iterator[list[tuple[float, bool]]]:
    """Every change of the overall health: when it came, in Unix seconds, and whether it is SERVING."""
    changes: list[tuple[float, bool]] = []
    with grpc.insecure_channel(address, options=options_for(address)) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

        def follow() -> None:
            # the call ends by being cancelled below, or with the server
            with contextlib.suppress(grpc.RpcError):
                for answer in call:
                    changes.append((time.time(), answer.status == SERVING))

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield changes
        finally:
            call.cancel()
            thread.join()


def _at(event: JobEvent) -> float:
    return event.time.ToNanoseconds() / 1e9


def _outcome(event: JobEvent) -> str:
    """How a job ended: the code that it failed with, or the name of its last event."""
    if not event.HasField("failed"):
        return event.WhichOneof("event") or ""
    code = next(code.name for code in grpc.StatusCode if code.value[0] == event.failed.status.code)
    return f"{code}{' (retryable)' if event.failed.retryable else ''}"


def _result(numbers: Numbers, kills: list[Kill]) -> Result:
    codes = [code for kill in kills for code in kill.codes]
    unavailable = sum(code == RETRYABLE for code in codes)
    rows = [
        ("running jobs that failed with UNAVAILABLE, retryable", f"{unavailable} of {len(codes)}"),
        ("kill to their failure", spread([1000 * kill.failed for kill in kills], "ms")),
        ("kill to health SERVING", spread([kill.serving for kill in kills], "s", 2)),
        *_rows("made at once", [kill.at_once for kill in kills]),
        *_rows("made after the failure", [kill.after_failure for kill in kills]),
    ]
    problems = [f"a running job ended with {code}" for code in codes if code != RETRYABLE]
    for kill in kills:
        for made, job in (("at once", kill.at_once), ("after the failure", kill.after_failure)):
            if job.outcome != "completed":
                problems.append(f"a job made {made} ended with {job.outcome}")
    return Result(
        columns=("what", f"of {len(kills)} kills"),
        rows=rows,
        figures={"jobs": numbers.jobs, "kills": [dataclasses.asdict(kill) for kill in kills]},
        problems=problems,
    )


def _rows(label: str, jobs: list[Next]) -> list[tuple[str, str]]:
    completed = sum(job.outcome == "completed" for job in jobs)
    first_steps = [job.first_step for job in jobs if job.first_step is not None]
    return [
        (f"next job, {label}: succeeded", f"{completed} of {len(jobs)}"),
        ("... kill to its creation", spread([1000 * job.created for job in jobs], "ms")),
        ("... kill to its first step", spread(first_steps, "s", 2) if first_steps else "-"),
    ]
