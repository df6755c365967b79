"""Clients of several habits for minutes on end, while the worker is killed again and again: what the server holds
before and after, and what became of every call.

Each client goes on with a random one of: wait for the picture, cancel it, leave its stream, ask for what is refused.
What must hold: every job has an end, no call hangs, and memory, handles, threads and shared memory return to what they
were.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from omni_grpc.client import Client
from omni_grpc.types.errors import OmniError

from .report import Result
from .server import PATIENCE, Server, rss_bytes, served

EXPECTED = {"WORKER_DIED", "JOB_CANCELLED", "WORKER_HUNG", "ENGINE_RESTARTING"}
"""Reasons for which a job may end while its worker is killed or its client cancels it."""
MOST_GROWTH_MB = 80.0
"""What the server may hold more at the end than after its first minute: the records of finished jobs, mostly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    seconds: float = 600.0
    clients: int = 4
    kill_every: float = 15.0
    """Seconds between two kills, on average."""
    look_every: float = 60.0
    settle: float = 20.0
    """Seconds for the last jobs to end and their records to expire."""
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """What the server holds. Memory in MB; `shared`: its blocks in /dev/shm."""

    seconds: float
    server: float
    worker: float
    handles: int
    threads: int
    shared: int
    kills: int


class Clients:
    """The clients' threads, and how their calls ended."""

    def __init__(self, server: Server, numbers: Numbers) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self._server = server
        self._numbers = numbers
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._go_on, args=(index,)) for index in range(numbers.clients)]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(2 * PATIENCE)
                if thread.is_alive():
                    self.problems.append("a client's call hangs")

    def _go_on(self, index: int) -> None:
        draw = random.Random(f"{self._numbers.seed} {index}")
        with Client(self._server.address) as client:
            while not self._over.is_set():
                act = draw.choice((self._wait, self._wait, self._cancel, self._leave, self._refused))
                try:
                    end = act(client, draw)
                except OmniError as error:
                    end = error.reason
                    if end not in EXPECTED:
                        self.problems.append(f"{act.__name__.strip('_')}: {end}: {error}")
                with self._lock:
                    self.ends[f"{act.__name__.strip('_')}: {end}"] += 1

    def _wait(self, client: Client, draw: random.Random) -> str:
        client.generate_image("a red circle", **_size(draw), steps=draw.randint(1, 8), timeout=PATIENCE)
        return "done"

    def _cancel(self, client: Client, draw: random.Random) -> str:
        with client.stream("a blue square", **_size(draw), steps=20, timeout=PATIENCE) as stream:
            for count, _ in enumerate(stream):
                if count >= draw.randint(0, 6):
                    stream.cancel()
                    return "cancelled"
        return "done"

    def _leave(self, client: Client, draw: random.Random) -> str:
        with client.stream("a star", **_size(draw), steps=20, timeout=PATIENCE) as stream:
            next(iter(stream))
        return "left"

    def _refused(self, client: Client, draw: random.Random) -> str:
        try:
            client.generate_image("x", width=33, height=32, timeout=PATIENCE)
        except OmniError as error:
            return "refused" if error.violations else error.reason
        return "not refused"


def _size(draw: random.Random) -> dict[str, int]:
    return {"width": 16 * draw.randint(2, 16), "height": 16 * draw.randint(2, 16)}


def run(checkpoint: Path) -> Result:
    flags = ("--retention", "5", "--restart-backoff", "0.2", "--disconnect-grace", "1", "--warm-up-seconds", "0")
    with served(checkpoint, *flags) as server:
        return measure(server, Numbers())


def measure(server: Server, numbers: Numbers) -> Result:
    clients, looks, kills = Clients(server, numbers), [_look(server, 0.0, 0)], 0
    began, draw = time.monotonic(), random.Random(numbers.seed)
    next_kill, next_look = numbers.kill_every, numbers.look_every
    with clients.at_work():
        while (now := time.monotonic() - began) < numbers.seconds:
            if now >= next_kill:
                with contextlib.suppress(LookupError, ProcessLookupError, FileNotFoundError):
                    os.kill(server.worker(), signal.SIGKILL)
                    kills += 1
                next_kill = now + draw.uniform(0.3, 1.7) * numbers.kill_every
            if now >= next_look:
                looks.append(_look(server, now, kills))
                next_look = now + numbers.look_every
            time.sleep(0.05)
    time.sleep(numbers.settle)
    with Client(server.address) as client:
        unended = [job.job_id for job in client.list_jobs() if job.end_time is None]
        client.generate_image("a red circle", width=64, height=64, steps=2, timeout=PATIENCE)
    time.sleep(numbers.settle / 4)
    looks.append(_look(server, time.monotonic() - began, kills))
    return _result(numbers, looks, clients, unended)


def _look(server: Server, seconds: float, kills: int) -> Look:
    worker = 0.0
    with contextlib.suppress(LookupError, FileNotFoundError):
        worker = rss_bytes(server.worker()) / 1e6
    return Look(
        seconds=seconds,
        server=server.rss_bytes() / 1e6,
        worker=worker,
        handles=len(list(Path(f"/proc/{server.pid}/fd").iterdir())),
        threads=len(list(Path(f"/proc/{server.pid}/task").iterdir())),
        shared=len(list(Path("/dev/shm").glob(f"omni-{server.pid}-*"))),
        kills=kills,
    )


def _result(numbers: Numbers, looks: list[Look], clients: Clients, unended: list[str]) -> Result:
    rows = [
        (
            f"{look.seconds:.0f} s",
            str(look.kills),
            f"{look.server:.0f} MB",
            f"{look.worker:.0f} MB",
            str(look.handles),
            str(look.threads),
            str(look.shared),
        )
        for look in looks
    ]
    first, last = looks[1] if len(looks) > 2 else looks[0], looks[-1]
    problems = sorted(set(clients.problems))
    if unended:
        problems.append(f"{len(unended)} jobs have no end: {', '.join(unended[:5])}")
    if last.server > first.server + MOST_GROWTH_MB:
        problems.append(f"the server grew from {first.server:.0f} to {last.server:.0f} MB")
    if last.handles > looks[0].handles + 10:
        problems.append(f"{last.handles} handles are open, {looks[0].handles} were at first")
    if last.shared:
        problems.append(f"{last.shared} blocks are left in /dev/shm")
    figures = {
        "numbers": dataclasses.asdict(numbers),
        "ends": dict(clients.ends),
        "looks": [dataclasses.asdict(look) for look in looks],
    }
    columns = ("after", "kills", "server", "worker", "handles", "threads", "blocks")
    return Result(columns=columns, rows=rows, figures=figures, problems=problems)
