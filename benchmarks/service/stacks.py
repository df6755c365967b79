"""What an event costs over each stack: gRPC, and Connect and gRPC-Web at the HTTP port, for one watcher and for many.

Every watcher asks for all events of a job that has ended, over a connection of its own, and reads bytes alone: what
decodes them would be the client's cost. The server's is its CPU time, of both stacks together in one process; a stack
that nobody calls takes none. The rounds take turns, so that a machine that is busy for a while is so for all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import statistics
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpc import aio

from omni_grpc.client import Client
from omni_grpc.v1 import job_pb2

from .arrivals import log
from .report import Result, spread
from .server import PATIENCE, Server, served

GRPC = "grpc"
STACKS = (GRPC, "connect+proto", "connect+json", "grpc-web+proto")
RPC = "/omni_grpc.v1.JobService/WatchJob"
FLAGS = ("--http-port", "0")
GOAL = 1.5
"""How many times gRPC's CPU an event may take over another stack that is not JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`events` is what each round sends at least, over all of its watchers."""

    steps: int = 200
    watchers: tuple[int, ...] = (1, 200)
    events: int = 20_000
    rounds: int = 5


def run(checkpoint: Path) -> Result:
    with served(checkpoint, *FLAGS) as server:
        return measure(server, Numbers())


def measure(server: Server, numbers: Numbers) -> Result:
    (http,) = re.findall(r"HTTP listens on http://(\S+)", server.logged())
    with Client(server.address) as client:
        job = client.create_job("a red circle", width=64, height=64, steps=numbers.steps, seed=1)
        events = log(client, job.job_id)
    watch = job_pb2.WatchJobRequest(job_id=job.job_id)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(numbers.rounds):
        for watchers in numbers.watchers:
            for stack in STACKS:
                address = server.address if stack == GRPC else http
                seen = asyncio.run(_round(server, address, stack, watch, watchers, len(events), numbers))
                found.setdefault((stack, watchers), []).append(seen)
    return _result(numbers, len(events), found)


async def _round(
    server: Server,
    address: str,
    stack: str,
    watch: job_pb2.WatchJobRequest,
    watchers: int,
    length: int,
    numbers: Numbers,
) -> dict[str, float]:
    """One round: events a second, and microseconds of the server's CPU for each."""
    times = max(1, round(numbers.events / (watchers * length)))
    follow = _over_grpc if stack == GRPC else _over_http
    cpu, began = server.cpu_seconds(), time.monotonic()
    async with asyncio.timeout(PATIENCE):
        counts = await asyncio.gather(*(follow(address, stack, watch, times) for _ in range(watchers)))
    seconds = time.monotonic() - began
    if set(counts) != {times * length}:
        raise RuntimeError(f"{stack}: {counts} events came, {times * length} were there for each watcher")
    total = sum(counts)
    return {"rate": total / seconds, "cpu_us": 1e6 * (server.cpu_seconds() - cpu) / total}


async def _over_grpc(address: str, stack: str, watch: job_pb2.WatchJobRequest, times: int) -> int:
    async with aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        call, count = channel.unary_stream(RPC, request_serializer=None, response_deserializer=None), 0
        for _ in range(times):
            async for _ in call(watch.SerializeToString()):
                count += 1
    return count


async def _over_http(address: str, stack: str, watch: job_pb2.WatchJobRequest, times: int) -> int:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = f'{{"jobId": "{watch.job_id}"}}'.encode() if stack.endswith("json") else watch.SerializeToString()
    body = struct.pack(">BI", 0, len(data)) + data
    head = f"POST {RPC} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/{stack}\r\n"
    count = 0
    try:
        for _ in range(times):
            writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
            count += await _envelopes(reader)
    finally:
        writer.close()
    return count


async def _envelopes(reader: asyncio.StreamReader) -> int:
    """How many messages an answer has, but for the one that ends it."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"the server answered {head!r}")
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    at = count = 0
    while at < len(body):
        flags, size = struct.unpack_from(">BI", body, at)
        at += 5 + size
        count += not flags
    return count


def _result(numbers: Numbers, length: int, found: Mapping[tuple[str, int], list[dict[str, float]]]) -> Result:
    rows, figures = [], []
    for (stack, watchers), rounds in found.items():
        rates, cpu = [one["rate"] for one in rounds], [one["cpu_us"] for one in rounds]
        base = statistics.median(one["cpu_us"] for one in found[GRPC, watchers])
        times = statistics.median(cpu) / base
        rows.append((stack, str(watchers), spread(rates, digits=0), spread(cpu, "us"), f"{times:.2f}"))
        figures.append({"stack": stack, "watchers": watchers, "times_grpc": times, "rounds": rounds})
    values: dict[str, Any] = dataclasses.asdict(numbers)
    return Result(
        columns=("stack", "watchers", "events/s", "server CPU per event", "times gRPC"),
        rows=rows,
        figures={"numbers": values, "events_of_the_job": length, "goal_times_grpc": GOAL, "stacks": figures},
    )
