"""A client process is killed in the middle of a stream; another one goes on with `after_seq`."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omni_grpc.client import Client

from .arrivals import STEP, Arrival, arrival, in_order, log, states
from .report import Result, spread
from .server import PATIENCE, Server, served


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    rounds: int = 5
    size: int = 256
    steps: int = 120
    kill_after: int = 20
    """Step events that the first client gets to see."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """What the two clients saw of one job. `gone` is the time in seconds without a client."""

    first: list[Arrival]
    second: list[Arrival]
    gone: float
    expected_states: list[int]
    expected: int
    fetched: bool

    @property
    def missing_states(self) -> int:
        return len(set(self.expected_states) - {one.seq for one in (*self.first, *self.second)})

    @property
    def missing_steps(self) -> int:
        seen = {one.seq for one in (*self.first, *self.second)}
        return self.expected - len(seen) - self.missing_states


def run(checkpoint: Path) -> Result:
    with served(checkpoint) as server:
        return measure(server, Numbers())


def measure(server: Server, numbers: Numbers) -> Result:
    return _result([_round(server, numbers) for _ in range(numbers.rounds)])


def _round(server: Server, numbers: Numbers) -> Round:
    first: list[Arrival] = []
    with _process(_stream, server.address, numbers.size, numbers.steps) as (pid, connection):
        job_id = _receive(connection)
        while sum(one.kind == STEP for one in first) < numbers.kill_after:
            first.append(_receive(connection))
        os.kill(pid, signal.SIGKILL)
        killed = time.time()
    with _process(_resume, server.address, job_id, first[-1].seq) as (_, connection):
        second: list[Arrival] = _receive(connection)
        fetched: bool = _receive(connection)
    with Client(server.address) as client:
        whole = log(client, job_id)
    return Round(
        first=first,
        second=second,
        gone=second[0].arrived - killed,
        expected_states=states(whole),
        expected=len(whole),
        fetched=fetched,
    )


def _stream(connection: Any, address: str, size: int, steps: int) -> None:
    """Body of the first client: generates an image and tells every event as it comes, until it is killed."""
    with Client(address) as client, client.stream("a red circle", width=size, height=size, steps=steps) as stream:
        connection.send(stream.job_id)
        for event in stream:
            connection.send(arrival(event))


def _resume(connection: Any, address: str, job_id: str, after_seq: int) -> None:
    """Body of the second client: knows the job and the last event that was seen."""
    with Client(address) as client:
        stream = client.watch_job(job_id, after_seq, timeout=PATIENCE)
        connection.send([arrival(event) for event in stream])
        # the download is checked against its SHA-256
        result = stream.result()
        connection.send(len(result.files) == len(result.artifacts) == 1)


@contextlib.contextmanager
def _process(body: Callable[..., None], *arguments: object) -> Iterator[tuple[int, Any]]:
    """A client in a process of its own: its id, and the pipe that it writes to. It is killed at the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=body, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        assert process.pid is not None
        yield process.pid, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def _receive(connection: Any) -> Any:
    if not connection.poll(PATIENCE):
        raise TimeoutError(f"a client has said nothing for {PATIENCE:.0f} s")
    return connection.recv()


def _result(rounds: list[Round]) -> Result:
    missing_states = sum(it.missing_states for it in rounds)
    missing_steps = sum(it.missing_steps for it in rounds)
    ordered = all(in_order([*it.first, *it.second]) for it in rounds)
    fetched = sum(it.fetched for it in rounds)
    problems = []
    if missing_states:
        problems.append(f"{missing_states} state events are missing")
    if not ordered:
        problems.append("events came twice or out of order")
    if fetched != len(rounds):
        problems.append(f"{len(rounds) - fetched} outputs could not be fetched")
    return Result(
        columns=("what", f"of {len(rounds)} killed clients"),
        rows=[
            ("state events, missing", f"{sum(len(it.expected_states) for it in rounds)}, {missing_states}"),
            ("step events, missing", f"{sum(it.expected - len(it.expected_states) for it in rounds)}, {missing_steps}"),
            ("in order, none twice", "yes" if ordered else "NO"),
            ("outputs fetched by the second client", f"{fetched} of {len(rounds)}"),
            ("time without a client", spread([it.gone for it in rounds], "s", 2)),
        ],
        figures={
            "state_events": sum(len(it.expected_states) for it in rounds),
            "state_events_missing": missing_states,
            "step_events_missing": missing_steps,
            "in_order": ordered,
            "outputs_fetched": fetched,
            "seconds_without_client": [it.gone for it in rounds],
            "events_before_kill": [len(it.first) for it in rounds],
            "events_after_resume": [len(it.second) for it in rounds],
        },
        problems=problems,
    )
