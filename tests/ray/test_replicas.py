"""Replicas in actors of a real Ray, through a real engine: no job is lost with any of them."""

import asyncio
import contextlib
import hashlib
import os
import random
import shutil
import signal
import sys
import time

import psutil
import pytest

from benchmarks.service.quick_worker import OUTPUT_BYTES
from benchmarks.service.ray_worker import DRIVER
from omni_grpc.checkpoint.registry import on_hub, open_model, unfetched
from omni_grpc.config import EngineConfig
from omni_grpc.config.sections import BUNDLED
from omni_grpc.engine import Engine, EngineState, JobState, Submission
from omni_grpc.engine.ray_executor import ray_executors
from omni_grpc.engine.replica import ReplicaState
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.store.open import open_storage
from omni_grpc.types.errors import OmniError
from omni_grpc.types.events import ArtifactReady
from omni_grpc.types.request import Draft
from tests.engine.manual import names
from tests.ray.conftest import gone
from tests.server.service import until

NOTHING = {"actors": 0, "groups": 0}


def made(cluster, **settings):
    """An engine whose workers take 20 ms for a step, and a Ray of its own where `cluster` is None."""
    defaults = {
        "distributed_executor_backend": "ray",
        "data_parallel_size": 2,
        "device": "cpu",
        "max_num_seqs": 1,
        "restart_backoff": 0.0,
        "ray_address": cluster and cluster.address,
    }
    config = EngineConfig.from_settings(**(defaults | settings))
    if on_hub(config.model):
        checkpoint = unfetched(config.model)
    else:
        checkpoint = open_model(config.model, apply=lambda found: apply_settings(config, found))
    first, *more = ray_executors(config, checkpoint, driver=DRIVER)
    return Engine(config, checkpoint, first, open_storage(config), more=more)


@contextlib.asynccontextmanager
async def running(cluster, **settings):
    """The engine, once all of its replicas are ready."""
    engine = made(cluster, **settings)
    try:
        await engine.start()
        await until(lambda: all(replica.ready for replica in engine._replicas))
        yield engine
    finally:
        await engine.close()
        await engine.storage.close()


async def refused(cluster, **settings):
    """The error that keeps an engine from starting."""
    engine = made(cluster, **settings)
    with pytest.raises(OmniError) as error:
        await engine.start()
    await engine.close()
    await engine.storage.close()
    return error.value


def ask(engine, steps=5, seed=7):
    draft = Draft(model=engine.checkpoint.name, prompt="a red circle", width=64, height=64, steps=steps, seeds=(seed,))
    return engine.submit(Submission(draft=draft, retention=600))[0]


async def ended(*jobs):
    """How jobs ended: the state, or the reason of the failure."""
    async with asyncio.timeout(60):
        for job in jobs:
            while not job.state.terminal:
                await job.wait(job.last_seq)
    return [str(job.state) if job.failure is None else job.failure.reason for job in jobs]


def pids(engine):
    return [replica.ready.pid for replica in engine._replicas]


def digest(job):
    (event,) = [entry.event for entry in job.entries if isinstance(entry.event, ArtifactReady)]
    return event.artifact.sha256


def made_of(seed):
    return hashlib.sha256(random.Random(seed).randbytes(OUTPUT_BYTES)).hexdigest()


async def stepping(job):
    await until(lambda: "StepProgress" in names(job))


async def test_replicas_share_one_queue_and_nothing_is_left_of_them(cluster):
    async with running(cluster) as engine:
        assert len(set(pids(engine))) == 2
        assert await asyncio.to_thread(cluster.state) == {"actors": 2, "groups": 2}
        jobs = [ask(engine, seed=seed) for seed in range(6)]
        await until(lambda: [job.state for job in jobs].count(JobState.RUNNING) == 2)
        assert await ended(*jobs) == ["SUCCEEDED"] * 6
        assert [digest(job) for job in jobs] == [made_of(seed) for seed in range(6)]
        left, began = pids(engine), time.monotonic()
    assert time.monotonic() - began < 15
    assert [gone(pid) for pid in left] == [True, True]
    assert await asyncio.to_thread(cluster.empties) == NOTHING
    assert "ray" not in sys.modules, "it is for processes beside the server"


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "sqlite"])
async def test_a_killed_actor_takes_no_job_along_that_was_not_begun(cluster, tmp_path, durable):
    async with running(cluster, **({"state_dir": str(tmp_path / "state")} if durable else {})) as engine:
        jobs = [ask(engine, steps=40, seed=seed) for seed in range(2)]
        waiting = [ask(engine, seed=seed) for seed in range(2, 6)]
        for job in (*jobs, *waiting):
            await engine.storage.journal.settled(job.id)
        await asyncio.gather(*map(stepping, jobs))
        dead = pids(engine)[0]
        os.kill(dead, signal.SIGKILL)
        assert sorted(await ended(*jobs)) == ["SUCCEEDED", "WORKER_DIED"]
        (lost,) = [job for job in jobs if job.failure is not None]
        assert lost.failure.retryable
        assert "died: its worker process has died (SYSTEM_ERROR); the log of that node" in lost.failure.message
        assert f"process {dead}" in lost.failure.message
        assert "\n" not in lost.failure.message
        assert await ended(*waiting) == ["SUCCEEDED"] * 4
        assert [digest(job) for job in waiting] == [made_of(seed) for seed in range(2, 6)]
        await until(lambda: dead not in pids(engine) and all(one.open for one in engine._replicas))
        assert engine.stats().worker_restarts == 1
        again = [ask(engine, steps=20) for _ in range(2)]
        await until(lambda: [job.state for job in again].count(JobState.RUNNING) == 2)
        assert await ended(*again) == ["SUCCEEDED"] * 2


@pytest.mark.parametrize("own", [False, True], ids=["cluster", "own"])
async def test_a_replica_is_drained_and_started_anew_while_jobs_go_on(cluster, own):
    async with running(None if own else cluster, data_parallel_size=1 if own else 2) as engine:
        jobs = [ask(engine, steps=20, seed=seed) for seed in range(4)]
        await stepping(jobs[0])
        before = pids(engine)
        engine.renew(0, 60.0)
        assert await ended(*jobs) == ["SUCCEEDED"] * 4
        await until(lambda: pids(engine)[0] != before[0] and engine.replicas[0].open)
        assert pids(engine)[1:] == before[1:]
        assert await ended(ask(engine), ask(engine)) == ["SUCCEEDED"] * 2


async def test_a_hung_actor_is_found_and_ended(cluster):
    async with running(cluster, data_parallel_size=1, worker_timeout=5) as engine:
        job, later = ask(engine, steps=200), ask(engine)
        await stepping(job)
        (hung,) = pids(engine)
        os.kill(hung, signal.SIGSTOP)
        assert await ended(job) == ["WORKER_HUNG"]
        assert "stopped responding for 5 s" in job.failure.message
        assert gone(hung)
        assert await ended(later) == ["SUCCEEDED"]


async def test_a_phase_that_never_ends_ends_with_its_actor(cluster):
    """The engine kills the driver, and with it ends an actor that would give signs of life for ever."""
    async with running(cluster, data_parallel_size=1) as engine:
        job = ask(engine, steps=5)
        await stepping(job)
        (pid,) = pids(engine)
        threads = psutil.Process(pid)
        engine._replicas[0].executor.kill()
        assert (await ended(job)) == ["WORKER_HUNG"]
        assert gone(threads.pid)


async def test_without_a_place_the_start_ends_and_tells_what_the_cluster_has(cluster):
    error = await refused(cluster, data_parallel_size=1, cpu_threads=64, ray_placement_timeout=1)
    assert error.failure.reason == "RAY_NO_PLACE"
    assert "within 1 s (--ray-placement-timeout): it needs 64 CPU and 0 GPU on one node" in str(error)
    assert "the cluster has 1 node(s): 127.0.0.1 with" in str(error)
    assert await asyncio.to_thread(cluster.empties) == NOTHING


async def test_a_replica_without_a_place_waits_while_the_others_work(cluster):
    engine = made(cluster, data_parallel_size=3, cpu_threads=2, ray_placement_timeout=5)
    starting = asyncio.ensure_future(engine.start())
    await starting
    await until(lambda: sum(one.open for one in engine._replicas) == 2)
    await until(lambda: any(one.failure and one.failure.reason == "RAY_NO_PLACE" for one in engine._replicas))
    assert engine.state is EngineState.READY
    assert await ended(*[ask(engine) for _ in range(3)]) == ["SUCCEEDED"] * 3
    assert {one.state for one in engine._replicas} == {ReplicaState.READY, ReplicaState.RESTARTING}
    await engine.close()


async def test_a_cluster_that_is_not_there_is_named(cluster):
    error = await refused(cluster, data_parallel_size=1, ray_address="127.0.0.1:9")
    assert error.failure.reason == "RAY_NOT_REACHED"
    assert "no Ray cluster at '127.0.0.1:9' can be used from this machine" in str(error)


async def test_a_folder_that_the_node_lacks_is_named(cluster, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder)
    engine = made(cluster, data_parallel_size=1, model=str(folder))
    shutil.rmtree(folder)
    with pytest.raises(OmniError) as error:
        await engine.start()
    assert error.value.failure.reason == "CHECKPOINT_NOT_ON_NODE"
    assert f"has no folder {folder}" in str(error.value)
    await engine.close()
