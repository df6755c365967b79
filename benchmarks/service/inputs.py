"""How long a large input holds up the server's event loop, from its file to the worker that has copied it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import os
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import av
import numpy as np

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.engine.executor import ProcessExecutor
from omni_grpc.engine.inputs import InputStore
from omni_grpc.media_in.decoder import Decoder
from omni_grpc.media_in.inputs import InputFile
from omni_grpc.types.media import VideoFormat
from omni_grpc.types.plan import Plan, Prepared, Ready, Report
from omni_grpc.types.request import Guidance, Request, Task
from omni_grpc.types.shared_inputs import media_of, read_inputs
from omni_grpc.types.spec import Checkpoint

from .report import Result
from .server import PATIENCE

TICK = 0.001
"""Seconds between two looks at the clock."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """A video whose frames take frames x width x height x 3 bytes: by default the most that a server takes."""

    frames: int = 256
    width: int = 1920
    height: int = 1080


@dataclasses.dataclass
class Stall:
    """The longest time that the loop was late, in seconds, with and without the time that its thread waited for a core,
    which other processes took; and how long it was watched.
    """

    longest: float = 0.0
    longest_by_itself: float = 0.0
    seconds: float = 0.0


def run(checkpoint: Path) -> Result:
    return measure(checkpoint, Numbers())


def measure(checkpoint: Path, numbers: Numbers) -> Result:
    return asyncio.run(_measure(checkpoint, numbers))


def worker(connection: Connection, config: EngineConfig, checkpoint: Checkpoint, prefix: str) -> None:
    """Copies the inputs of each request, as the real one does before it prepares it."""
    connection.send(Ready(pid=os.getpid(), device="cpu", dtype="float32", load_seconds=0.0, weight_bytes=0))
    while (plan := connection.recv()) is not None:
        for request in plan.admit:
            size = sum(len(medium.data) for medium in media_of(read_inputs(request.inputs)))
            connection.send(Prepared(id=request.id, elapsed=0.0, prompt_tokens=size))


async def _measure(folder: Path, numbers: Numbers) -> Result:
    # the worker below gives no signs of life while it waits
    config = EngineConfig.from_settings(model=str(folder), worker_timeout=600)
    executor = ProcessExecutor(config, open_checkpoint(folder), worker="benchmarks.service.inputs:worker")
    decoder, store = Decoder(config.limits), InputStore(config.limits.input_budget)
    reports: asyncio.Queue[Report] = asyncio.Queue()
    executor.start(reports.put_nowait)
    await asyncio.wait_for(reports.get(), PATIENCE)
    files = [InputFile(path="source_video", name="source_video", data=_video(numbers))]
    await asyncio.to_thread(decoder.decode, [], store)  # the process is there
    stalls: dict[str, Stall] = {}
    async with _watched(stalls, "nothing"):
        await asyncio.sleep(1.0)
    async with _watched(stalls, "decode"):
        inputs, _ = await asyncio.to_thread(decoder.decode, files, store)
    request = _request(numbers)
    async with _watched(stalls, "hand over to the worker"):
        executor.submit(Plan(admit=(dataclasses.replace(request, inputs=inputs),)))
        report = await asyncio.wait_for(reports.get(), PATIENCE)
    async with _watched(stalls, "free"):
        store.free(inputs)
        while store.size_bytes:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(TICK)
    decoder.kill()
    await executor.close()
    size = numbers.frames * numbers.width * numbers.height * 3
    arrived = report.prompt_tokens if isinstance(report, Prepared) else 0
    return _result(stalls, size, arrived)


@contextlib.asynccontextmanager
async def _watched(stalls: dict[str, Stall], what: str) -> AsyncIterator[None]:
    stall = stalls[what] = Stall()

    async def watch() -> None:
        while True:
            before, waited = time.perf_counter(), _core_wait()
            await asyncio.sleep(TICK)
            late = time.perf_counter() - before - TICK
            stall.longest = max(stall.longest, late)
            stall.longest_by_itself = max(stall.longest_by_itself, late - (_core_wait() - waited))

    watching = asyncio.ensure_future(watch())
    began = time.perf_counter()
    try:
        yield
    finally:
        # once more, so that what the block did last is seen
        await asyncio.sleep(2 * TICK)
        stall.seconds = time.perf_counter() - began
        watching.cancel()


def _core_wait() -> float:
    """Seconds that this thread was ready to run and had no core to run on, so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _video(numbers: Numbers) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=25, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = numbers.width, numbers.height, "yuv420p"
        pixels = np.zeros((numbers.height, numbers.width, 3), np.uint8)
        for i in range(numbers.frames):
            pixels[:] = i % 256
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def _request(numbers: Numbers) -> Request:
    return Request(
        id="job_1",
        model="tiny",
        prompt="",
        negative_prompt=None,
        task=Task.VIDEO_TO_VIDEO,
        width=numbers.width,
        height=numbers.height,
        steps=1,
        guidance=Guidance(),
        seeds=(0,),
        num_outputs=1,
        output_format=VideoFormat.MP4,
    )


def _result(stalls: dict[str, Stall], size: int, arrived: int) -> Result:
    rows = [
        (
            what,
            f"{stall.seconds:.2f} s",
            f"{1000 * stall.longest_by_itself:.2f} ms",
            f"{1000 * stall.longest:.2f} ms",
        )
        for what, stall in stalls.items()
    ]
    figures = {
        "decoded_bytes": size,
        "stalls": {
            what: {
                "seconds": stall.seconds,
                "longest_by_itself_ms": 1000 * stall.longest_by_itself,
                "longest_ms": 1000 * stall.longest,
            }
            for what, stall in stalls.items()
        },
    }
    problems = [] if arrived == size else [f"{arrived} of {size} bytes arrived in the worker"]
    return Result(
        columns=(f"with {size} bytes", "takes", "the loop is late by at most", "with waits for a core"),
        rows=rows,
        figures=figures,
        problems=problems,
    )
