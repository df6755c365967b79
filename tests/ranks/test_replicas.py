"""Two replicas of two ranks each: jobs go to both, and the loss of a rank is that of its replica alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import psutil

from omni_grpc.engine import Engine, EngineState, JobState
from omni_grpc.engine.replica import ReplicaState
from tests.ranks.group import events, pids_of, serving, until


async def test_a_rank_that_is_killed_takes_its_own_replica_alone(tiny_qwen_image: Path) -> None:
    settings = {"data_parallel_size": 2, "ulysses_degree": 2, "max_num_seqs": 2}
    async with serving(tiny_qwen_image, **settings) as served:
        first, second = served.executor, *served.more
        await until(lambda: all(one.state is ReplicaState.READY for one in served.engine._replicas))
        assert len(set(served.pids)) == 4
        (expected,) = await served.pixels(served.submit())
        # more than both hold at once, so that some wait
        jobs = [served.submit(steps=60, seeds=(seed,)) for seed in range(8)]
        await until(lambda: all(events(job).count("StepProgress") > 2 for job in jobs[:4]))
        held = [_jobs_of(served.engine, number) for number in (0, 1)]
        assert [len(each) for each in held] == [2, 2]
        lost, kept = pids_of(second), pids_of(first)
        os.kill(lost[1], signal.SIGKILL)
        await until(lambda: not any(map(psutil.pid_exists, lost)))
        # the other one serves meanwhile, what waited and what comes
        assert served.engine.state is EngineState.READY
        during = served.submit()
        assert np.abs((await served.pixels(during))[0] - expected).max() <= 1
        for job in jobs:
            await served.ended(job)
        assert pids_of(first) == kept
        failed = {job.id: job.failure for job in jobs if job.state is not JobState.SUCCEEDED}
        assert failed.keys() == held[1], "what it had begun, and nothing else"
        for failure in failed.values():
            assert failure.retryable
            assert f"rank 1 of 2, process {lost[1]} died by signal SIGKILL" in failure.message
        await until(lambda: all(one.state is ReplicaState.READY for one in served.engine._replicas))
        assert [one.restarts for one in served.engine._replicas] == [0, 1]
        for job in [served.submit() for _ in range(4)]:
            assert np.abs((await served.pixels(job))[0] - expected).max() <= 1


def _jobs_of(engine: Engine, number: int) -> set[str]:
    return set(engine._replicas[number].scheduler.held)
