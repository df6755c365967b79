"""Groups of ranks in actors of a real Ray: the pixels of the same group without it, and one end for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import time

import numpy as np
import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine.ray_executor import RayExecutor, ray_executors
from omni_grpc.types.errors import Unavailable
from omni_grpc.types.events import Failed, Retrying
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.plan import Broken, Died, Plan, Prepared, Ready, Sleep, Slept
from tests.engine.test_rank_executor import request
from tests.ranks.group import serving, until
from tests.ranks.test_pixels import made_by
from tests.ray.conftest import gone
from tests.ray.rank_workers import PAUSED, TOY, pauses
from tests.ray.test_nodes import nodes
from tests.ray.test_replicas import NOTHING
from tests.toy import toy_checkpoint

pytestmark = pytest.mark.timeout(400)

SOON = 90
"""Seconds in which a group of Ray comes and goes on a busy machine."""
BOUND = 30
"""Seconds in which all ranks have to be gone, once one is: what was told waits for the last of them."""


class Group:
    """An executor whose ranks are toys, and its reports."""

    def __init__(self, cluster, **settings: object) -> None:
        usual = {"ring_degree": 2, "rank_timeout": 3.0, "device": "cpu", "ray_address": cluster.address}
        config = EngineConfig.from_settings(distributed_executor_backend="ray", **usual | settings)
        self.executor = RayExecutor(config, toy_checkpoint(limits=str, defaults=str), None, driver=TOY)
        self.reports: asyncio.Queue = asyncio.Queue()

    async def next(self) -> object:
        return await asyncio.wait_for(self.reports.get(), SOON)

    async def start(self) -> None:
        self.executor.start(self.reports.put_nowait)
        assert isinstance(await self.next(), Loading), "one rank tells how far it is"
        assert isinstance(await self.next(), Ready)

    def prepare(self, prompt: str) -> None:
        self.executor.submit(Plan(admit=(request(prompt),)))


ENDS: dict[str, tuple[str, str]] = {
    "1:dies": ("WORKER_DIED", r"rank 1 of 2 on node \S+ \(process \d+\) died: its worker process has died"),
    "1:gives-up": ("X", "rank 1 of 2: said by 1"),
    "1:counts": ("RANKS_DISAGREE", "rank 1 of 2 and rank 0 disagree on its prepare of job_1"),
    "0:hangs": ("RANK_STUCK", r"rank 0 of 2 is 3 s late with its prepare of job_1 \(rank 1: Prepared\)"),
}


async def test_ranks_answer_as_one_and_end_as_one(cluster):
    group = Group(cluster)
    await group.start()
    assert await asyncio.to_thread(cluster.state) == {"actors": 2, "groups": 1}
    group.prepare("x")
    assert await group.next() == Prepared(id="job_1", elapsed=0.0, prompt_tokens=0)
    group.executor.order(Sleep())
    assert await group.next() == Slept(freed_bytes=0, elapsed=0.0)
    group.executor.submit(Plan(decode=("fails 0",)))
    assert isinstance(await group.next(), Broken)
    group.prepare("x")
    assert (await group.next()).prompt_tokens == 1, "each rank has dropped it, before what came next"
    for prompt, (reason, message) in ENDS.items():
        group.prepare(prompt)
        died = await group.next()
        assert (type(died), died.failure.reason) == (Died, reason), prompt
        assert re.search(message, died.failure.message), died.failure.message
        with pytest.raises(Unavailable):
            group.prepare("x")
        await group.start()
    group.prepare("x")
    assert isinstance(await group.next(), Prepared)
    await group.executor.close()
    assert group.reports.empty(), "no report is left over"
    assert await asyncio.to_thread(cluster.empties) == NOTHING


async def test_without_a_place_for_all_ranks_the_error_says_how_many(cluster):
    group = Group(cluster, ring_degree=16, ray_placement_timeout=1)
    group.executor.start(group.reports.put_nowait)
    died = await group.next()
    assert (type(died), died.failure.reason) == (Died, "RAY_NO_PLACE")
    assert "it needs for each of 16 ranks 1 CPU and 0 GPU on one node" in died.failure.message
    await group.executor.close()


def over_ray(address: str, driver: str = PAUSED):
    """What makes the executor of a server."""

    def make(config, checkpoint):
        (executor,) = ray_executors(config, checkpoint, driver=driver)
        return executor

    return {
        "make": make,
        "distributed_executor_backend": "ray",
        "ray_address": address,
        "ulysses_degree": 2,
        "vae_patch_parallel_size": 2,
    }


@pytest.fixture
def model(tiny_qwen_image, tmp_path):
    """A tiny checkpoint that is this test's, with a folder for the marks of its ranks."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_qwen_image, folder)
    pauses(folder).mkdir()
    return folder


def ranks(model) -> list[list[str]]:
    """Process, node and network interface of each."""
    return [(pauses(model) / f"rank-{rank}").read_text().split() for rank in range(2)]


async def lost(served, model, phase, rank, number, said) -> None:
    """One job whose rank is ended in a phase, and the one after it."""
    marks = pauses(model)
    (marks / phase).touch()
    job = served.submit()
    await until((marks / f"{phase}.{rank}").exists)
    pids, began = [int(pid) for pid, *_ in ranks(model)], time.monotonic()
    os.kill(pids[rank], number)
    assert [gone(pid, BOUND) for pid in pids] == [True, True]
    assert time.monotonic() - began < BOUND
    for mark in marks.glob(f"{phase}*"):
        mark.unlink()
    await served.ended(job)
    told = [entry.event for entry in job.entries if isinstance(entry.event, Retrying | Failed)]
    assert len(told) == 1, told
    assert (told[0].failure.reason, told[0].failure.retryable) == (said, True)
    assert f"rank {rank} of 2 on node" in told[0].failure.message
    assert isinstance(told[0], Retrying) == (phase == "prepare"), "a job that was not prepared goes back to the queue"
    assert (job.failure is None) == (phase == "prepare")
    assert (await served.ended(served.submit())).failure is None


async def test_a_group_makes_the_pixels_of_one_without_ray_also_after_each_rank_was_killed(
    cluster, tiny_qwen_image, model
):
    ours = over_ray(cluster.address)
    sizes = {name: value for name, value in ours.items() if name in ("ulysses_degree", "vae_patch_parallel_size")}
    async with serving(tiny_qwen_image, **sizes) as served:
        expected = await made_by(served, "qwen_image")
    async with serving(model, **ours, rank_timeout=60.0, worker_timeout=10.0) as served:
        made = await made_by(served, "qwen_image")
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(made, expected, strict=True))
        await lost(served, model, "prepare", 0, signal.SIGKILL, "WORKER_DIED")
        await lost(served, model, "step", 1, signal.SIGKILL, "WORKER_DIED")
        await lost(served, model, "step", 1, signal.SIGSTOP, "WORKER_HUNG")
        assert served.engine.stats().worker_restarts == 3
        again = await made_by(served, "qwen_image")
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(again, expected, strict=True))
    assert await asyncio.to_thread(cluster.empties) == NOTHING


async def test_a_group_with_a_rank_on_each_of_two_nodes(cluster, model):
    """Each node has room for one. Both are at the same address, so ranks meet on the loopback interface."""
    async with contextlib.AsyncExitStack() as stack:
        other, say = await stack.enter_async_context(nodes(cluster.environment))
        await say("add")
        served = await stack.enter_async_context(serving(model, **over_ray(other.address)))
        (_, first, interface), (_, second, _) = ranks(model)
        assert first != second
        assert interface == "lo"
        expected = await made_by(served, "qwen_image")
        assert min(picture.std() for picture in expected) > 1
        await lost(served, model, "step", 1, signal.SIGKILL, "WORKER_DIED")
        (pauses(model) / "step").touch()
        job = served.submit()
        await until((pauses(model) / "step.0").exists)
        pids = [int(pid) for pid, *_ in ranks(model)]
        await say("kill")
        await served.ended(job)
        (pauses(model) / "step").unlink()
        assert job.failure.reason == "WORKER_DIED"
        assert re.match(r"rank \d of 2 on node", job.failure.message), job.failure.message
        assert [gone(pid, BOUND) for pid in pids] == [True, True]
        await say("add")
        again = await made_by(served, "qwen_image")
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(again, expected, strict=True))
