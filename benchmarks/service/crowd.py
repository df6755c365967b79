"""A crowd: a thousand watchers of twenty jobs, and two thousand connections that do nothing. How late are step events,
is any state event lost, and what memory does the server take?

The watchers are in one process, on several connections. Connections that do nothing are sockets that have shaken hands
in HTTP/2, as a client does that waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.cli.bench.figures import quantile
from omni_grpc.client import AsyncClient, Client

from .arrivals import arrival, log, states
from .report import Result
from .server import Server, served
from .watchers import Watched

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, ACKNOWLEDGED = b"\0\0\0\4\0\0\0\0\0", b"\0\0\0\4\1\0\0\0\0"
"""Frames of HTTP/2 without a payload: RFC 9113, 6.5."""
PATIENCE = 240.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """Jobs of `size` pixels squared with `steps`: large enough that the worker sets the pace."""

    jobs: int = 20
    watchers: int = 1000
    connections: int = 10
    size: int = 384
    steps: int = 40
    idle: int = 2000
    calls: int = 300


def run(checkpoint: Path) -> Result:
    numbers = Numbers()
    # one thread for the worker: the other core is for the server and the watchers, as where a GPU computes
    flags = ("--max-num-seqs", str(numbers.jobs), "--max-step-ms", "1e9", "--cpu-threads", "1")
    with served(checkpoint, *flags) as server:
        return measure(server, numbers)


def measure(server: Server, numbers: Numbers) -> Result:
    with Client(server.address) as client:
        client.generate_image("a red circle", width=64, height=64, steps=2)  # pays for what is made at first use
        before = server.rss_bytes()
    watched, expected, most = asyncio.run(_watched(server, numbers))
    crowd = {**watched.figures(expected), **watched.lags()}
    crowd |= {"rss_before_mb": before / 1e6, "rss_most_mb": most / 1e6, "rss_after_mb": server.rss_bytes() / 1e6}
    idle = _idle(server, numbers)
    return Result(
        columns=("what", "figure"),
        rows=_rows(numbers, crowd, idle),
        figures={"jobs": numbers.jobs, "watchers": numbers.watchers, "crowd": crowd, "idle": idle},
        problems=_problems(crowd, idle, numbers),
    )


async def _watched(server: Server, numbers: Numbers) -> tuple[Watched, list[list[int]], int]:
    """What each watcher got, the state events that it had to get, and the most memory meanwhile, in bytes."""
    async with contextlib.AsyncExitStack() as opened, asyncio.timeout(PATIENCE):
        clients = [await opened.enter_async_context(AsyncClient(server.address)) for _ in range(numbers.connections)]
        jobs = [
            await clients[0].create_job(
                "a red circle", width=numbers.size, height=numbers.size, steps=numbers.steps, seed=seed
            )
            for seed in range(numbers.jobs)
        ]
        job_ids = [jobs[place % len(jobs)].job_id for place in range(numbers.watchers)]
        cpu, own, most = server.cpu_seconds(), time.process_time(), [0]
        looking = asyncio.create_task(_look(server, most))
        watchers = (_watch(clients[place % len(clients)], job_id) for place, job_id in enumerate(job_ids))
        arrivals = await asyncio.gather(*watchers)
        looking.cancel()
        watched = Watched(arrivals, server_cpu=server.cpu_seconds() - cpu, client_cpu=time.process_time() - own)
    with Client(server.address) as reader:
        logs = {job.job_id: states(log(reader, job.job_id)) for job in jobs}
    return watched, [logs[job_id] for job_id in job_ids], most[0]


async def _watch(client: AsyncClient, job_id: str) -> list[Any]:
    return [arrival(event) async for event in client.watch_job(job_id)]


async def _look(server: Server, most: list[int]) -> None:
    while True:
        most[0] = max(most[0], server.rss_bytes())
        await asyncio.sleep(0.25)


# --- connections that do nothing --------------------------------------------------------------------------------------


def _idle(server: Server, numbers: Numbers) -> dict[str, Any]:
    with Client(server.address) as client:
        alone = _calls(client, numbers.calls)
        before = server.rss_bytes()
        began = time.monotonic()
        with _connections(server.address, numbers.idle) as sockets:
            took = time.monotonic() - began
            beside = _calls(client, numbers.calls)
            with_them, alive = server.rss_bytes(), sum(_open(one) for one in sockets)
        time.sleep(1.0)
        return {
            "connections": numbers.idle,
            "open_at_the_end": alive,
            "seconds_to_open": took,
            "rss_before_mb": before / 1e6,
            "rss_with_mb": with_them / 1e6,
            "rss_after_mb": server.rss_bytes() / 1e6,
            "kb_each": (with_them - before) / 1e3 / numbers.idle,
            "call_p50_ms": quantile(alone, 0.5),
            "call_p99_ms": quantile(alone, 0.99),
            "call_beside_p50_ms": quantile(beside, 0.5),
            "call_beside_p99_ms": quantile(beside, 0.99),
        }


def _calls(client: Client, count: int) -> list[float]:
    """Milliseconds of each of so many calls, one after the other."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        client.list_models()
        taken.append(1000 * (time.perf_counter() - began))
    return taken


@contextlib.contextmanager
def _connections(address: str, count: int) -> Iterator[Sequence[socket.socket]]:
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as opened:
        sockets = []
        for _ in range(count):
            one = opened.enter_context(socket.create_connection((host, int(port)), timeout=30.0))
            one.sendall(PREFACE + SETTINGS)
            if one.recv(9)[3:4] != b"\4":
                raise RuntimeError("the server did not answer with SETTINGS")
            one.sendall(ACKNOWLEDGED)
            sockets.append(one)
        yield sockets


def _open(one: socket.socket) -> bool:
    """Whether the server has not closed it. What it sends beside SETTINGS is read and left."""
    one.setblocking(False)
    try:
        while data := one.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return bool(data)


# --- the report -------------------------------------------------------------------------------------------------------


def _rows(numbers: Numbers, crowd: dict[str, Any], idle: dict[str, Any]) -> list[tuple[str, str]]:
    steps = crowd["step_events"] + crowd["step_events_left_out"]
    return [
        (f"{numbers.watchers} watchers of {numbers.jobs} jobs: events", f"{crowd['events_per_second']:.0f} per second"),
        ("... state events", f"{crowd['state_events_received']} of {crowd['state_events_expected']}"),
        (
            "... step events left out",
            f"{crowd['step_events_left_out']} of {steps}",
        ),
        ("... lag of step events, p50", f"{crowd['lag_p50_ms']:.0f} ms"),
        ("... p99", f"{crowd['lag_p99_ms']:.0f} ms"),
        ("... memory of the server before, at most, after", _memory(crowd, "before", "most", "after")),
        ("... CPU time of the server for one event", f"{crowd['server_cpu_us_per_event']:.0f} us"),
        (f"{numbers.idle} connections that do nothing: opened in", f"{idle['seconds_to_open']:.1f} s"),
        ("... memory of the server before, with them, after", _memory(idle, "before", "with", "after")),
        ("... each", f"{idle['kb_each']:.1f} kB"),
        ("... a call alone, p50 and p99", f"{idle['call_p50_ms']:.1f} and {idle['call_p99_ms']:.1f} ms"),
        ("... beside them", f"{idle['call_beside_p50_ms']:.1f} and {idle['call_beside_p99_ms']:.1f} ms"),
    ]


def _memory(found: dict[str, Any], *names: str) -> str:
    return ", ".join(f"{found[f'rss_{name}_mb']:.0f}" for name in names) + " MB"


def _problems(crowd: dict[str, Any], idle: dict[str, Any], numbers: Numbers) -> list[str]:
    problems = []
    if crowd["state_events_lost"] or crowd["state_events_received"] != crowd["state_events_expected"]:
        problems.append(f"{crowd['state_events_lost']} state events were lost")
    if crowd["watchers_out_of_order"]:
        problems.append(f"{crowd['watchers_out_of_order']} watchers got events out of order")
    if idle["open_at_the_end"] != numbers.idle:
        problems.append(f"the server closed {numbers.idle - idle['open_at_the_end']} idle connections")
    return problems
