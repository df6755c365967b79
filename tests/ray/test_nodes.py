"""Replicas on another node than the server's: what of the cluster may go, and what stays."""

import asyncio
import contextlib
import os
import subprocess
import sys

from omni_grpc.engine import EngineState
from omni_grpc.types.version import __version__
from tests.ray.conftest import ROOT, Cluster, of
from tests.ray.test_replicas import ask, digest, ended, made_of, pids, refused, running, stepping
from tests.server.service import until


@contextlib.asynccontextmanager
async def nodes(token, folder=ROOT):
    """A cluster whose head has no room, with one other node, and what is said to it. The token is that of all tests."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "tests" / "ray" / "two_nodes.py")),
        cwd=folder,
        env={**environment, **{name: value for name, value in token.items() if name != "RAY_ADDRESS"}},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    address, place = (await process.stdout.readline()).decode().split()

    async def say(word):
        process.stdin.write(f"{word}\n".encode())
        assert (await process.stdout.readline()).decode().strip() == word

    try:
        yield Cluster({**token, "RAY_ADDRESS": address}, place), say
    finally:
        process.stdin.close()
        await process.wait()
    assert of(place) == []


def one(cluster):
    """An engine with one replica, and jobs that take their time."""
    return running(cluster, data_parallel_size=1, max_steps=5000)


async def test_a_replica_goes_to_another_node_and_the_server_outlives_the_head(cluster):
    async with (
        nodes(cluster.environment) as (other, say),
        one(other) as engine,
    ):
        first, (pid,) = ask(engine, seed=3), pids(engine)
        assert await ended(first) == ["SUCCEEDED"]
        assert digest(first) == made_of(3)
        job, waiting = ask(engine, steps=500), ask(engine, seed=5)
        await stepping(job)
        await say("kill")
        assert await ended(job) == ["WORKER_DIED"]
        assert job.failure.retryable
        assert f"(process {pid}) died: its node " in job.failure.message
        assert engine.state is EngineState.RESTARTING
        await say("add")
        assert await ended(waiting) == ["SUCCEEDED"], "it waits for a place on the new one"
        assert digest(waiting) == made_of(5)
        await loses_its_head(engine, say)


async def loses_its_head(engine, say):
    """The GCS goes, and does not come back: the server keeps its queue, and tries again."""
    job, waiting = ask(engine, steps=2000), ask(engine)
    await stepping(job)
    await say("head")
    assert await ended(job) == ["WORKER_DIED"]
    assert "Ray ends that process when the head of its cluster" in job.failure.message
    assert engine.state is EngineState.RESTARTING
    await until(lambda: engine.failure.reason == "RAY_NOT_REACHED")
    assert not waiting.state.terminal


async def test_a_node_without_this_package_is_told_so(cluster, tmp_path, monkeypatch):
    """Its Python finds an omni_grpc that is another one."""
    # Ray gives a driver's folder to workers: on another machine it is not there
    monkeypatch.chdir(tmp_path)
    (tmp_path / "omni_grpc").mkdir()
    (tmp_path / "omni_grpc" / "__init__.py").touch()
    async with nodes({**cluster.environment, "PYTHONPATH": str(tmp_path)}, folder=tmp_path) as (other, _):
        error = await refused(other, data_parallel_size=1)
    assert error.failure.reason == "RAY_VERSION_MISMATCH"
    assert f"a node lacks omni_grpc {__version__} (ModuleNotFoundError: No module named" in str(error)
    assert "install the same on each node" in str(error)
