"""What signals do to `serve`: these tests send real ones, to this process, around a worker that the test holds."""

import asyncio
import os
import signal

import pytest

from omni_grpc.cli import serve
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, EngineState, JobState, Submission
from omni_grpc.engine.scheduler import Lane
from omni_grpc.fleet import Fleet
from omni_grpc.types.request import Draft

from .fake_executor import FakeExecutor
from .service import CHECKPOINT, until


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def engine(executor: FakeExecutor) -> Engine:
    return Engine(EngineConfig.from_settings(model="toy", port=0, drain_timeout=600), CHECKPOINT, executor)


async def test_a_signal_while_the_model_loads_ends_the_start(engine, executor, capsys):
    executor.loading.close()
    serving = asyncio.create_task(serve.serve(Fleet.of(engine)))
    await until(lambda: engine._started is not None)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    assert engine.state is EngineState.STOPPED
    assert capsys.readouterr().out == "", "it never listened"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_an_idle_server_stops_at_once(engine, capsys, number):
    serving = asyncio.create_task(serve.serve(Fleet.of(engine)))
    said = []
    # the line comes a moment after the engine is ready
    await until(lambda: said.append(capsys.readouterr().out) or "\n" in "".join(said))
    assert engine.state is EngineState.READY
    os.kill(os.getpid(), number)
    assert await serving == 0
    assert "".join([*said, capsys.readouterr().out]).count("\n") == 1


async def test_a_second_signal_ends_the_drain(engine, executor):
    executor.gates[Lane.STEP].close()
    serving = asyncio.create_task(serve.serve(Fleet.of(engine)))
    await until(lambda: engine.state is EngineState.READY)
    job, _ = engine.submit(Submission(draft=Draft(model="toy", prompt="x")))
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: engine.state is EngineState.DRAINING)
    assert job.state is JobState.RUNNING
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    assert (job.state, job.failure.reason, job.failure.retryable) == (JobState.FAILED, "SERVER_STOPPED", True)
