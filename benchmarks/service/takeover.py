"""Two servers on one database of PostgreSQL and one folder of outputs; one is killed with running and waiting jobs.

Every job is watched through the other server, from before the kill to its end. A job counts as taken over with its
first event after the kill: the other server has it, and whoever watches sees that. The servers' worker has no model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from omni_grpc.v1 import event_pb2, generation_pb2, job_pb2, options_pb2

from .clients import Client
from .ledger import PROGRESS
from .lives import FSYNC, POSTGRESQL, QUICK, place, started
from .quick_worker import MODEL, STEP
from .report import Result, spread

PATIENCE = 120.0
"""Seconds that a job may take to its end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`jobs` of the server that is killed and `others` of the one that is not; `running` of the former have started at
    the kill. Each takes `steps` steps of `step` seconds, `at_once` of a server at a time.
    """

    leases: Sequence[float] = (2.0, 10.0)
    rounds: int = 3
    jobs: int = 20
    others: int = 4
    running: int = 4
    at_once: int = 4
    steps: int = 20
    step: float = 0.05
    state_url: str = ""


@dataclasses.dataclass
class Seen:
    """What one watcher saw of a job: events with the time at which they came, in seconds of time.time()."""

    job_id: str
    events: list[tuple[float, event_pb2.JobEvent]] = dataclasses.field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return [event.WhichOneof("event") or "" for _, event in self.events]

    def first_after(self, killed: float) -> float | None:
        """Seconds from the kill to the first event that happened after it."""
        return next((at - killed for at, event in self.events if event.time.ToNanoseconds() / 1e9 > killed), None)


def run(checkpoint: Path) -> Result:
    return measure(Numbers())


def measure(numbers: Numbers) -> Result:
    found = {lease: [_round(lease, numbers) for _ in range(numbers.rounds)] for lease in numbers.leases}
    return _result(numbers, found)


def _round(lease: float, numbers: Numbers) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(place(POSTGRESQL, numbers.state_url))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = (*where.flags, "--lease-seconds", f"{lease:g}", "--max-num-seqs", str(numbers.at_once))
        environment = {STEP: str(numbers.step)}
        doomed, its_address = stack.enter_context(started(QUICK, flags, folder / "doomed.log", environment))
        _, address = stack.enter_context(started(QUICK, flags, folder / "other.log", environment))
        first, other = Client(its_address), Client(address)
        stack.callback(first.close)
        stack.callback(other.close)
        jobs = [first.create(_request(numbers)).job.job_id for _ in range(numbers.jobs)]
        jobs += [other.create(_request(numbers)).job.job_id for _ in range(numbers.others)]
        seen = [Seen(job_id) for job_id in jobs]
        threads = [threading.Thread(target=_watch, args=(other, one)) for one in seen]
        for thread in threads:
            thread.start()
        _until(lambda: sum("step_progress" in one.kinds for one in seen[: numbers.jobs]) >= numbers.running)
        running = sum("started" in one.kinds and one.kinds[-1] != "completed" for one in seen[: numbers.jobs])
        done = sum(one.kinds[-1:] == ["completed"] for one in seen[: numbers.jobs])
        killed = time.time()
        doomed.kill()
        for thread in threads:
            thread.join(PATIENCE)
        problems = [problem for one in seen for problem in _problems(other, one)]
        if problems:
            said = (folder / "other.log").read_text().splitlines()
            print("\n".join(line for line in said if " INFO " not in line)[-5000:], flush=True)
        taken = [one.first_after(killed) for one in seen[: numbers.jobs]]
        return {
            "running_at_kill": running,
            "waiting_at_kill": numbers.jobs - running - done,
            "taken_seconds": sorted(at for at in taken if at is not None),
            "all_done_seconds": max(at for one in seen for at, _ in one.events) - killed,
            "problems": problems,
        }


def _problems(client: Client, one: Seen) -> Sequence[str]:
    """What is wrong with a job that has ended: in what its watcher saw, and in what its log says."""
    try:
        log = list(client.watch(one.job_id))
    except grpc.RpcError as error:
        return [f"{one.job_id}: cannot be watched: {error.details()}"]  # type: ignore[attr-defined]
    kept = [event for event in log if event.WhichOneof("event") not in PROGRESS]
    seen = [event for _, event in one.events if event.WhichOneof("event") not in PROGRESS]
    seqs = [event.seq for _, event in one.events]
    problems = []
    if one.kinds[-1:] != ["completed"] or one.kinds.count("completed") != 1:
        problems.append(f"{one.job_id}: its watcher saw it end with {one.kinds[-1:]}, not once with completed")
    if [event.seq for event in kept] != [event.seq for event in seen]:
        problems.append(f"{one.job_id}: its watcher saw {len(seen)} changes, and its log has {len(kept)}")
    if seqs != sorted(set(seqs)):
        problems.append(f"{one.job_id}: its watcher saw a seq twice, or out of order")
    for artifact in client.job(one.job_id).artifacts:
        if client.download(artifact.artifact_id) != artifact.sha256:
            problems.append(f"{one.job_id}: its output has other bytes than its SHA-256 says")
    return problems


def _watch(client: Client, seen: Seen) -> None:
    try:
        for event in client.watch(seen.job_id):
            seen.events.append((time.time(), event))
    except grpc.RpcError as error:
        # `_problems` says that its end was not seen
        print(f"{seen.job_id}: {error.details()}", flush=True)  # type: ignore[attr-defined]


def _request(numbers: Numbers) -> job_pb2.CreateJobRequest:
    options = options_pb2.JobOptions(
        on_disconnect=options_pb2.DISCONNECT_POLICY_KEEP, on_server_restart=options_pb2.RESTART_POLICY_REQUEUE
    )
    image = generation_pb2.GenerateImageRequest(
        model=MODEL, prompt="x", width=64, height=64, sampling={"steps": numbers.steps}, options=options
    )
    return job_pb2.CreateJobRequest(generate_image=image)


def _until(condition: Any) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("the jobs do not start")
        time.sleep(0.01)


def _result(numbers: Numbers, found: dict[float, list[dict[str, Any]]]) -> Result:
    rows, problems = [], []
    for lease, rounds in found.items():
        name = f"lease {lease:g} s"
        problems += [problem for one in rounds for problem in one["problems"]]
        rows += [
            (f"{name}: running and waiting jobs at the kill", _pairs(rounds)),
            (f"{name}: kill to the first job taken over", spread([one["taken_seconds"][0] for one in rounds], "s", 2)),
            (f"{name}: kill to the last", spread([one["taken_seconds"][-1] for one in rounds], "s", 2)),
            (f"{name}: kill to the end of all jobs", spread([one["all_done_seconds"] for one in rounds], "s", 1)),
        ]
    jobs = numbers.jobs + numbers.others
    rows += [
        ("jobs that did not end once, or were not seen so", f"{len(problems)} of {jobs * numbers.rounds * len(found)}"),
        ("commits", FSYNC[POSTGRESQL]),
    ]
    return Result(
        columns=("what", f"of {numbers.rounds} kills each"),
        rows=rows,
        figures={
            "numbers": dataclasses.asdict(numbers) | {"state_url": bool(numbers.state_url)},
            "leases": {f"{lease:g}": rounds for lease, rounds in found.items()},
        },
        problems=problems,
    )


def _pairs(rounds: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{one['running_at_kill']} and {one['waiting_at_kill']}" for one in rounds)
