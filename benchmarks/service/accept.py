"""How many jobs a server takes per second, and what it costs to keep them.

A real server process, whose worker takes no step, so that nothing but accepting is measured; its clients are another
process, one CreateJob after the other each. A reply comes once the job is committed. The queue only grows meanwhile.

The cost of a step event is the CPU time of the process that appends it: jobs of a Journal take their steps in turns, as
in the engine, and whatever the store does for that counts, its threads too. The loop is watched meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpc import aio

from omni_grpc.cli.bench.figures import quantile
from omni_grpc.client.channel import DIRECT
from omni_grpc.store.job import Job, new_job_id
from omni_grpc.store.journal import Journal
from omni_grpc.store.memory import MemoryStore
from omni_grpc.store.seam import Store
from omni_grpc.store.sql import SqlStore
from omni_grpc.types.events import Queued, Started, StepProgress
from omni_grpc.v1 import generation_pb2, job_pb2, job_pb2_grpc, options_pb2

from .lives import FSYNC, MEMORY, QUICK, SQLITE, STORES, Place, place, started
from .quick_worker import MODEL, STEP
from .report import Result
from .store import new_record as stored_record

FLAGS = ("--max-queue", "10000000", "--phase-timeout", "3600", "--warm-up-seconds", "0", "--max-num-seqs", "4")
GOAL_PER_SECOND, GOAL_P99_MS, GOAL_EVENT_US = 500.0, 50.0, 50.0
"""Of SQLite: with 16 clients and more, and added to an event."""
CHANNELS = 8
"""Connections of all clients together: one would be a queue of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`seconds` of each number of clients, after `settle` seconds that do not count. `jobs` that take `steps` steps,
    one every `pause` seconds, for the cost of an event.
    """

    stores: Sequence[str] = STORES
    clients: Sequence[int] = (1, 16, 64)
    seconds: float = 5.0
    settle: float = 1.0
    jobs: int = 16
    steps: int = 1000
    pause: float = 0.002


def run(checkpoint: Path) -> Result:
    return measure(Numbers())


def measure(numbers: Numbers) -> Result:
    found: dict[str, dict[str, Any]] = {}
    for store in numbers.stores:
        found[store] = {"clients": {}}
        for count in numbers.clients:
            # a server of its own, so that each begins with an empty queue
            with place(store) as where:
                found[store]["clients"][count] = _accepting(where, count, numbers)
        with place(store) as where:
            found[store]["event"] = asyncio.run(_events(where, numbers))
    return result(numbers, found)


# --- new jobs ---------------------------------------------------------------------------------------------------------


def _accepting(where: Place, count: int, numbers: Numbers) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        flags = (*FLAGS, *where.flags)
        with started(QUICK, flags, Path(folder) / "log", {STEP: "0"}) as (life, address):
            return asyncio.run(_clients(address, count, numbers, life.pid))


async def _clients(address: str, count: int, numbers: Numbers, server: int) -> dict[str, float]:
    """Jobs per second, milliseconds of a call, and the server's CPU time for one."""
    options = (("grpc.use_local_subchannel_pool", 1), *DIRECT)
    channels = [aio.insecure_channel(address, options=options) for _ in range(min(count, CHANNELS))]
    stubs = [job_pb2_grpc.JobServiceStub(channel) for channel in channels]
    taken: list[float] = []
    began = time.perf_counter() + numbers.settle
    until = began + numbers.seconds

    async def client(number: int) -> None:
        stub, chance = stubs[number % len(stubs)], random.Random(number)
        while (sent := time.perf_counter()) < until:
            await stub.CreateJob(_request(chance))
            if sent >= began:
                taken.append(time.perf_counter() - sent)

    clients = [asyncio.ensure_future(client(number)) for number in range(count)]
    await asyncio.sleep(max(0.0, began - time.perf_counter()))
    used = _cpu_seconds(server)
    await asyncio.gather(*clients)
    used = _cpu_seconds(server) - used
    for channel in channels:
        await channel.close()
    return {
        "per_second": len(taken) / numbers.seconds,
        "p50_ms": 1000 * quantile(taken, 0.5),
        "p99_ms": 1000 * quantile(taken, 0.99),
        "longest_ms": 1000 * max(taken),
        "server_cpu_ms_per_job": 1000 * used / len(taken),
    }


def _request(chance: random.Random) -> job_pb2.CreateJobRequest:
    options = options_pb2.JobOptions(
        request_id=f"{chance.getrandbits(64)}-{time.time_ns()}",
        labels={"project": f"p{chance.randrange(20)}"},
        on_disconnect=options_pb2.DISCONNECT_POLICY_KEEP,
    )
    sampling = {"steps": 30, "seed": chance.randrange(1 << 31)}
    image = generation_pb2.GenerateImageRequest(
        model=MODEL,
        prompt="a red circle left of a blue square",
        width=64,
        height=64,
        sampling=sampling,
        options=options,
    )
    return job_pb2.CreateJobRequest(generate_image=image)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- step events ------------------------------------------------------------------------------------------------------


async def _events(where: Place, numbers: Numbers) -> dict[str, float]:
    """CPU time in microseconds of a step event, and how long the loop was held at most, in milliseconds: beside what
    the loop takes without any.
    """
    async with _opened(where) as store:
        journal = Journal(store.jobs, server="bench", immediate=store.immediate)
        journal.start()
        jobs = [Job(stored_record(new_job_id())) for _ in range(numbers.jobs)]
        for job in jobs:
            journal.create(job)
            job.append(Queued(position=0, queue_depth=0))
            await journal.acknowledged(job)
            job.append(Started(model="m", seeds=(1,), width=64, height=64, total_steps=numbers.steps, queue_wait=0.0))
            await journal.settled(job.id)
        idle, idle_held = await _rounds([], numbers)
        busy, held = await _rounds(jobs, numbers)
        for job in jobs:
            assert job.appended_seq == numbers.steps + 2
        await journal.stop(10.0)
    count = numbers.jobs * numbers.steps
    return {
        "cpu_us": 1e6 * (busy - idle) / count,
        "loop_held_p99_ms": 1000 * quantile(held, 0.99),
        "loop_held_ms": 1000 * max(held),
        "loop_held_idle_p99_ms": 1000 * quantile(idle_held, 0.99),
        "loop_held_idle_ms": 1000 * max(idle_held),
    }


async def _rounds(jobs: Sequence[Job], numbers: Numbers) -> tuple[float, list[float]]:
    """CPU seconds of the process, and how much later than asked for the loop came back, each time."""
    held: list[float] = []
    watching = asyncio.create_task(_watch(held))
    began = time.process_time()
    for step in range(1, numbers.steps + 1):
        event = StepProgress(
            step=step, total_steps=numbers.steps, sigma=0.5, timestep=500.0, step_time=0.002, elapsed=1.0, eta=1.0,
            rows_total=2,
        )  # fmt: skip
        for job in jobs:
            job.append(event)
        await asyncio.sleep(numbers.pause)
    used = time.process_time() - began
    watching.cancel()
    return used, held


async def _watch(held: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        held.append(time.perf_counter() - began - 0.001)


@contextlib.asynccontextmanager
async def _opened(where: Place) -> AsyncIterator[Store]:
    flags = dict(zip(where.flags[::2], where.flags[1::2], strict=True))
    store: Store = MemoryStore()
    if "--state-dir" in flags:
        store = SqlStore.sqlite(Path(flags["--state-dir"]) / "jobs.db")
    elif "--state-url" in flags:
        store = SqlStore.postgresql(flags["--state-url"])
    await store.open()
    try:
        yield store
    finally:
        await store.close()


# --- the report -------------------------------------------------------------------------------------------------------


def result(numbers: Numbers, found: Mapping[str, Mapping[str, Any]]) -> Result:
    rows, goals = [], {}
    for store, figures in found.items():
        for count, of in figures["clients"].items():
            rows.append(
                (
                    f"CreateJob, {count} clients",
                    store,
                    f"{of['per_second']:.0f} /s, p50 {of['p50_ms']:.1f} ms, p99 {of['p99_ms']:.1f} ms",
                    f"{of['server_cpu_ms_per_job']:.2f} ms",
                )
            )
            if store == SQLITE and count >= 16:
                goals[f"{count} clients, jobs per second"] = of["per_second"] >= GOAL_PER_SECOND
                goals[f"{count} clients, p99"] = of["p99_ms"] < GOAL_P99_MS
        event = figures["event"]
        held = f"loop held {event['loop_held_p99_ms']:.1f} ms (p99), {event['loop_held_ms']:.1f} ms at most"
        if store == SQLITE:
            before = found[MEMORY]["event"]["cpu_us"] if MEMORY in found else 0.0
            goals["added to a step event"] = event["cpu_us"] - before < GOAL_EVENT_US
        rows.append(("a step event", store, held, f"{event['cpu_us']:.1f} us"))
    rows += [("commits", store, FSYNC[store], "") for store in found]
    return Result(
        columns=("what", "store", "found", "CPU time of the server for one"),
        rows=rows,
        figures={
            "numbers": dataclasses.asdict(numbers),
            "fsync": {store: FSYNC[store] for store in found},
            "stores": found,
            "goals_of_sqlite_reached": goals,
        },
        arguments=f"--store {','.join(numbers.stores)} --clients {','.join(map(str, numbers.clients))}",
    )
