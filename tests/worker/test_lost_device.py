"""What a kernel that reads out of bounds does to a server: its job fails, its worker ends, and the next one serves. Run
by `make gpu-test` too.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.config.sections import BUNDLED
from omni_grpc.engine import Engine, ProcessExecutor, Submission
from omni_grpc.engine.status import EngineState
from omni_grpc.store.job import Job
from omni_grpc.store.records import JobState
from omni_grpc.types.request import Draft
from tests.worker.bad_kernel import AT_ONCE, LATER

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


async def _ended(job: Job) -> Job:
    async with asyncio.timeout(SECONDS):
        while not job.state.terminal:
            await job.wait(job.last_seq)
    return job


async def _serve_and_break(prompt: str) -> None:
    config = EngineConfig.from_settings(model=str(BUNDLED), device="cuda", warm_up_seconds=0, restart_backoff=0.1)
    checkpoint = open_checkpoint(config.model.model, name="demo")
    engine = Engine(config, checkpoint, ProcessExecutor(config, checkpoint, worker="tests.worker.bad_kernel:serve"))
    states: list[EngineState] = []
    engine.on_state.append(states.append)
    await engine.start()
    first = engine.ready

    def submit(prompt: str) -> Job:
        return engine.submit(Submission(draft=Draft(model="demo", prompt=prompt, steps=4, seeds=(1,))))[0]

    before = await _ended(submit("a red circle"))
    broken = await _ended(submit(prompt))
    after = await _ended(submit("a red circle"))
    assert (before.state, after.state) == (JobState.SUCCEEDED, JobState.SUCCEEDED)
    assert broken.failure is not None
    assert broken.failure.reason == "DEVICE_LOST"
    assert "illegal memory access" in broken.failure.message
    assert states == [EngineState.READY, EngineState.RESTARTING, EngineState.READY]
    assert first is not None
    assert engine.ready is not None
    assert engine.ready.pid != first.pid
    assert engine.stats().worker_restarts == 1
    await engine.close()


@pytest.mark.parametrize("prompt", [AT_ONCE, LATER])
def test_the_worker_ends_and_the_next_one_serves(prompt: str) -> None:
    asyncio.run(_serve_and_break(prompt))


OFFLINE = """
from omni_grpc import Omni
from tests.worker.bad_kernel import AT_ONCE, break_for

break_for((AT_ONCE,))
with Omni(device="cuda", warm_up_seconds=0) as omni:
    for prompt in ("a red circle", AT_ONCE, "a red circle"):
        try:
            print(len(omni.generate(prompt, steps=4, seed=1).files))
        except Exception as error:
            print(error.failure.reason, error.failure.message)
"""


def test_offline_the_next_call_says_that_the_process_is_of_no_more_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    drawn, lost, refused = done.stdout.splitlines()
    assert drawn == "1"
    assert lost.startswith("DEVICE_LOST ")
    assert refused.startswith("ENGINE_FAILED ")
    assert refused.endswith("start a new process")
