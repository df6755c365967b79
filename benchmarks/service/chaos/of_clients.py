"""A bad network to clients, clients that do not read, many of them, floods of cancels, and too few files."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from omni_grpc.client.channel import DIRECT
from omni_grpc.v1 import job_pb2, job_pb2_grpc, options_pb2

from ..clients import Client
from ..ledger import Known
from .crowd import make
from .fault import Fault
from .machine import files_of
from .of_stores import weather
from .proxy import Proxy, Weather
from .stage import Setting, Stage

PREVIEW = options_pb2.PreviewOptions(method=options_pb2.PREVIEW_METHOD_LATENT_RGB, every_steps=1, max_edge_px=512)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2 begins with: the preface, and settings without any."""
WATCHERS, WATCHED = 1000, 20
IDLE = 2000
NEVER_READ = 50
CANCELS, CANCELLERS = 400, 8
SPARE_FILES = 12


@contextlib.contextmanager
def _behind_proxy(setting: Setting) -> Iterator[Proxy]:
    from .stage import free_port

    port = free_port()
    proxy = Proxy(("127.0.0.1", port))
    setting.port = port
    setting.front = f"127.0.0.1:{proxy.port}"
    try:
        yield proxy
    finally:
        proxy.close()


def _reset(stage: Stage, proxy: Proxy, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        proxy.cut()
        time.sleep(stage.chance.uniform(0.1, 0.5))


# --- many -------------------------------------------------------------------------------------------------------------


def _many_watchers(stage: Stage, tools: Any, seconds: float) -> None:
    """All watch to the end of their jobs, and each sees all that its log says."""
    client = Client(stage.direct)
    try:
        jobs = [_acknowledged(stage, client, steps=40) for _ in range(WATCHED)]
        streams = asyncio.run(_watch_all(stage.direct, [jobs[at % WATCHED].job_id for at in range(WATCHERS)]))
        for known in jobs:
            kept = None
            for job_id, seqs, kinds in streams:
                if job_id != known.job_id:
                    continue
                if seqs != sorted(set(seqs)):
                    stage.ledger.report(f"{job_id}: one of its watchers saw a seq twice, or out of order")
                states = [kind for kind in kinds if kind not in ("step_progress", "decode_progress")]
                kept = kept or states
                if states != kept or states[-1:] not in (["completed"], ["failed"], ["cancelled"]):
                    stage.ledger.report(f"{job_id}: one of its watchers saw {states}, and another one {kept}")
    finally:
        client.close()


async def _watch_all(address: str, job_ids: list[str]) -> list[tuple[str, list[int], list[str]]]:
    channels = [
        grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1), *DIRECT)) for _ in range(20)
    ]

    async def watch(at: int, job_id: str) -> tuple[str, list[int], list[str]]:
        stub = job_pb2_grpc.JobServiceStub(channels[at % len(channels)])
        call = stub.WatchJob(job_pb2.WatchJobRequest(job_id=job_id), timeout=120)
        events = [message.event async for message in call if message.event.seq]
        return job_id, [event.seq for event in events], [event.WhichOneof("event") or "" for event in events]

    try:
        return await asyncio.gather(*(watch(at, job_id) for at, job_id in enumerate(job_ids)))
    finally:
        for channel in channels:
            await channel.close()


def _acknowledged(stage: Stage, client: Client, *, steps: int, preview: bool = False) -> Known:
    request = make(stage.model, stage.chance, (steps, steps))
    if preview:
        request.generate_image.options.preview.CopyFrom(PREVIEW)
    return stage.ledger.acknowledge(request, client.create(request))


def _slow_watchers(stage: Stage, tools: Any, seconds: float) -> None:
    """They open a stream of a job with a large preview at every step, and do not read from it."""
    client = Client(stage.direct)
    held = []
    try:
        jobs = [_acknowledged(stage, client, steps=60, preview=True) for _ in range(4)]
        for at in range(NEVER_READ):
            one = Client(stage.direct)
            held.append((one, one.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=jobs[at % len(jobs)].job_id))))
        time.sleep(seconds)
    finally:
        for one, call in held:
            call.cancel()
            one.close()
        client.close()


def _idle_connections(stage: Stage, tools: Any, seconds: float) -> None:
    host, port = stage.direct.split(":")
    held = []
    try:
        for _ in range(IDLE):
            one = socket.create_connection((host, int(port)), timeout=20)
            one.sendall(PREFACE)
            held.append(one)
        time.sleep(seconds)
    finally:
        for one in held:
            one.close()


def _cancel_flood(stage: Stage, tools: Any, seconds: float) -> None:
    """Jobs that are cancelled at once, twice each; all of them end."""

    def flood(each: int) -> None:
        client = Client(stage.direct)
        try:
            for _ in range(each):
                known = _acknowledged(stage, client, steps=20)
                known.asked.add("cancel")
                for _ in range(2):
                    client.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=known.job_id), timeout=20)
        except grpc.RpcError as error:
            stage.ledger.report(f"a call of the flood failed: {error.code()}: {error.details()}")  # type: ignore[attr-defined]
        finally:
            client.close()

    threads = [threading.Thread(target=flood, args=(CANCELS // CANCELLERS,)) for _ in range(CANCELLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


def _files_out(stage: Stage, tools: Any, seconds: float) -> None:
    """RLIMIT_NOFILE a few above what is open, while more clients connect than there are files for."""
    pid = stage.life.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (files_of(pid) + SPARE_FILES, before[1]))
    host, port = stage.direct.split(":")
    held = []
    try:
        for _ in range(4 * SPARE_FILES):
            one = socket.socket()
            one.settimeout(1)
            # one that is not accepted waits in the kernel's queue
            with contextlib.suppress(OSError):
                one.connect((host, int(port)))
                one.sendall(PREFACE)
            held.append(one)
        time.sleep(seconds)
    finally:
        for one in held:
            one.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


FAULTS = (
    Fault(
        name="network_far",
        what="60 +- 40 ms and 2 % of loss each way to clients for 5 s",
        strike=weather(Weather(delay=0.06, jitter=0.04, loss=0.02)),
        around=_behind_proxy,
        seconds=5.0,
    ),
    Fault(
        name="network_silent",
        what="nothing comes through to clients or back for 5 s, and nobody is told",
        strike=weather(Weather(stalled=True)),
        around=_behind_proxy,
        seconds=5.0,
    ),
    Fault(
        name="network_cut",
        what="connections of clients are reset every 0.1 to 0.5 s, for 4 s",
        strike=_reset,
        around=_behind_proxy,
        seconds=4.0,
        also=(grpc.StatusCode.INTERNAL,),
    ),
    Fault(
        name="watchers_many",
        what=f"{WATCHERS} watchers of {WATCHED} jobs",
        strike=_many_watchers,
        harmless=True,
    ),
    Fault(
        name="watchers_slow",
        what=f"{NEVER_READ} watchers with a preview at every step that never read, for 6 s",
        strike=_slow_watchers,
        seconds=6.0,
        harmless=True,
    ),
    Fault(
        name="connections_idle",
        what=f"{IDLE} connections that say nothing, for 3 s",
        strike=_idle_connections,
        seconds=3.0,
        harmless=True,
    ),
    Fault(
        name="cancel_flood",
        what=f"{CANCELS} jobs that are cancelled at once, twice each",
        strike=_cancel_flood,
        harmless=True,
    ),
    Fault(
        name="files_out",
        what=f"{SPARE_FILES} more files than are open, and {4 * SPARE_FILES} more connections, for 3 s",
        strike=_files_out,
        seconds=3.0,
    ),
)
