"""Ctrl-C, as a terminal sends it: SIGINT to a process that waits for images."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from omni_grpc.engine.scheduler import Lane
from tests.client.proxy import until

ROOT = Path(__file__).resolve().parents[2]

SYNC = """
import sys
from omni_grpc.client import Client
with Client(sys.argv[1]) as client:
    try:
        client.generate_image("x", progress=True)
    except KeyboardInterrupt:
        print("interrupted")
        raise SystemExit(7)
"""
ASYNC = """
import asyncio, sys
from omni_grpc.client import AsyncClient
async def main():
    async with AsyncClient(sys.argv[1]) as client:
        await client.generate_image("x", progress=True)
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
    raise SystemExit(7)
"""
REASONS = {SYNC: "interrupted by the user", ASYNC: "the client's task was cancelled"}


@pytest.mark.parametrize("program", REASONS, ids=["sync", "async"])
async def test_ctrl_c_cancels_the_job_on_the_server(service, program):
    steps = service.executor.gates[Lane.STEP]
    steps.close()
    steps.let(1)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, f"127.0.0.1:{service.server.port}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    await until(lambda: len(service.engine.jobs))
    job = service.engine.jobs.newest()[0]
    await job.wait(3, None)
    assert process.stderr is not None
    async for line in process.stderr:  # the client has seen the step too
        if line.startswith(b"step 1/4"):
            break
    process.send_signal(signal.SIGINT)
    output, _ = await process.communicate()
    assert (process.returncode, output) == (7, b"interrupted\n")
    assert job.entries[-1].event.reason == REASONS[program]
    assert job.entries[-1].event.completed_steps == 1
