"""Several processes as one worker: what one says all have to say, and the end of one is the end of all."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine.agreement import Agreement
from omni_grpc.engine.executor import HubExecutor
from omni_grpc.engine.rank_executor import RankExecutor
from omni_grpc.engine.workers import executors
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, ConfigError, Failure, Unavailable
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.lora import Adapter
from omni_grpc.types.media import ImageInput, Inputs
from omni_grpc.types.plan import (
    AdapterFailed,
    AdapterLoaded,
    AdapterUnloaded,
    Broken,
    Decoded,
    Died,
    Fetched,
    LoadAdapter,
    Plan,
    Prepared,
    Ready,
    Recorded,
    RecordingEnd,
    Sleep,
    Slept,
    Wake,
    Woken,
)
from omni_grpc.types.request import Draft, Request
from omni_grpc.types.vitals import Vitals
from tests.toy import toy_checkpoint

WORKER = "tests.engine.toy_ranks:serve"
SOON = 20
"""Seconds in which everything here has to happen."""


def configured(**settings: object) -> EngineConfig:
    return EngineConfig.from_settings(model="toy", **{"ulysses_degree": 2, "rank_timeout": 1.0} | settings)


def request(prompt: str, number: int = 1, inputs: Inputs | None = None) -> Request:
    draft = Draft(model="toy", prompt=prompt)
    facts = ServingFacts(toy_checkpoint(), configured().limits)
    made = resolve_request(draft, facts, id=f"job_{number}").request
    return made if inputs is None else dataclasses.replace(made, inputs=inputs)


class Group:
    """An executor of ranks that has been started, and its reports."""

    def __init__(self, executor: RankExecutor) -> None:
        self.executor = executor
        self.reports: asyncio.Queue = asyncio.Queue()

    async def next(self) -> object:
        return await asyncio.wait_for(self.reports.get(), SOON)

    async def start(self) -> object:
        self.executor.start(self.reports.put_nowait)
        assert isinstance(await self.next(), Loading), "one rank tells how far it is"
        return await self.next()

    @property
    def pids(self) -> list[int]:
        return self.executor._process.pids

    def prepare(self, prompt: str, number: int = 1) -> None:
        self.executor.submit(Plan(admit=(request(prompt, number),)))


@asynccontextmanager
async def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str = "toy", **settings: object
) -> AsyncIterator[Group]:
    """A group that is ready. At its end nothing of it is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = configured(**settings)
    group = Group(RankExecutor(config, named(name), [{}] * config.parallel.sizes.world, worker=WORKER))
    assert isinstance(await group.start(), Ready)
    pids = group.pids
    yield group
    await asyncio.wait_for(group.executor.close(), SOON)
    assert group.reports.empty(), "no report is left over"
    assert not any(map(psutil.pid_exists, [*pids, *group.pids]))
    assert os.listdir(tmp_path) == []
    assert not list(shared.BLOCKS.glob(f"omni-{os.getpid()}-*"))


def named(name: str):
    return dataclasses.replace(toy_checkpoint(limits=str, defaults=str), name=name)


async def test_a_group_answers_as_one_worker_by_its_first_rank(tmp_path, monkeypatch):
    async with started(tmp_path, monkeypatch, sequence_parallel_size=4) as group:
        assert len(set(group.pids)) == 4
        assert group.executor.pid == group.pids[0]
        group.prepare("x")
        assert await group.next() == Prepared(id="job_1", elapsed=0.0, prompt_tokens=0)
        group.executor.order(Sleep())
        assert await group.next() == Slept(freed_bytes=0, elapsed=0.0)
        group.executor.order(Wake())
        assert isinstance(await group.next(), Woken)


async def test_each_rank_says_how_it_is_under_its_own_number(tmp_path, monkeypatch):
    async with started(tmp_path, monkeypatch) as group:
        first, second = group.executor._process._processes
        first.vitals, second.vitals = None, (told := Vitals(resident_bytes=5))
        assert group.executor.all_vitals() == {1: told}, "the first has not said it yet"


async def test_a_report_waits_for_the_last_rank_and_a_failure_of_all_is_one_of_the_request(tmp_path, monkeypatch):
    """The second rank also loads for longer than it may lag later: ranks load at their own pace."""
    async with started(tmp_path, monkeypatch, "slow 1", rank_timeout=1.4) as group:
        began = time.monotonic()
        group.prepare("1:waits")
        assert isinstance(await group.next(), Prepared)
        assert time.monotonic() - began >= 0.5
        group.prepare("0:fails 1:fails")
        report = await group.next()
        assert (type(report), report.failure.message) == (Broken, "said by 0")
        group.prepare("x", 2)
        assert isinstance(await group.next(), Prepared)


def test_what_a_rank_has_recorded_waits_for_no_other_one():
    agreed = []
    agreement = Agreement(
        2,
        decoding=1,
        timeout=1.0,
        later=lambda *_: pytest.fail("no rank is late"),
        agreed=agreed.append,
        end=pytest.fail,
    )
    told = [Recorded(id="prf_1", end=RecordingEnd.STEPS, steps=1, rank=rank) for rank in (1, 0)]
    for one in told:
        agreement.hear(one.rank, one)
    assert agreed == told


STYLE = Adapter(id="a", file="a", sha256="", format="peft", rank=1, size_bytes=1, applied={}, uid="a@1")
NOT_THERE = Failure(code=Code.INVALID_ARGUMENT, reason="BAD_LORA", message="not there")


@pytest.mark.parametrize("last", [0, 1])
def test_an_adapter_that_one_rank_cannot_load_is_loaded_by_none(last):
    """Whichever answers last. Beside it, another one that all have is not held up."""
    agreed = []
    agreement = Agreement(
        2, decoding=1, timeout=1.0, later=lambda *_: pytest.fail("late"), agreed=agreed.append, end=pytest.fail
    )
    other = dataclasses.replace(STYLE, uid="b@1")
    failed = AdapterFailed(uid="a@1", failure=NOT_THERE, rank=1 - last)
    agreement.hear(1 - last, failed)
    agreement.hear(1 - last, AdapterLoaded(adapter=other, rank=1 - last))
    agreement.hear(last, AdapterLoaded(adapter=other, rank=last))
    agreement.hear(last, AdapterLoaded(adapter=STYLE, rank=last))
    assert agreed == [AdapterLoaded(adapter=other, rank=0), failed]
    for rank in (0, 1):
        agreement.hear(rank, AdapterUnloaded(uid="a@1", rank=rank))
    assert agreed[2:] == [AdapterUnloaded(uid="a@1")]


@pytest.mark.parametrize("rank", [0, 1])
async def test_what_other_ranks_have_of_an_adapter_that_one_lacks_is_unloaded(tmp_path, monkeypatch, rank):
    async with started(tmp_path, monkeypatch) as group:
        group.executor.order(LoadAdapter(id="a", uid="a@1", path=f"fails {rank}"))
        failed = await group.next()
        assert (failed.uid, failed.rank, failed.failure.message) == ("a@1", rank, f"said by {rank}")
        assert await group.next() == AdapterUnloaded(uid="a@1")
        group.executor.order(LoadAdapter(id="a", uid="a@2", path="there"))
        loaded = await group.next()
        assert (type(loaded), loaded.adapter.uid, loaded.rank) == (AdapterLoaded, "a@2", 0)


async def test_only_the_first_rank_answers_a_decode_and_what_fails_is_dropped_by_all(tmp_path, monkeypatch):
    async with started(tmp_path, monkeypatch) as group:
        group.executor.submit(Plan(decode=("job_1", "fails 0")))
        assert isinstance(await group.next(), Decoded)
        assert isinstance(await group.next(), Broken)
        group.prepare("x")
        assert (await group.next()).prompt_tokens == 1, "each rank has dropped it, before what came next"


async def test_ranks_that_share_a_decode_end_it_together(tmp_path, monkeypatch):
    async with started(tmp_path, monkeypatch, vae_patch_parallel_size=2) as group:
        group.executor.submit(Plan(decode=("job_1", "fails 0")))
        decoded = await group.next()
        assert (type(decoded), decoded.elapsed) == (Decoded, 0.0)
        assert isinstance(await group.next(), Broken), "the file alone could not be made, and no rank hangs"


ENDS: dict[str, tuple[str, str]] = {
    "0:dies": ("WORKER_DIED", "rank 0 of 2, process"),
    "1:dies": ("WORKER_DIED", "rank 1 of 2, process"),
    "0:gives-up": ("X", "rank 0 of 2: said by 0"),
    "1:gives-up": ("X", "rank 1 of 2: said by 1"),
    "0:gives-up 1:gives-up": ("X", r"rank \d of 2: said by \d"),
    "0:gives-up 1:dies-late": ("WORKER_DIED", "rank 1 of 2, process"),
    "1:fails": (
        "RANKS_DISAGREE",
        "rank 1 of 2 and rank 0 disagree on its prepare of job_1: X, said by 1, and Prepared",
    ),
    "1:counts": ("RANKS_DISAGREE", "rank 1 of 2 and rank 0 disagree"),
    "0:hangs": ("RANK_STUCK", r"rank 0 of 2 is 1 s late with its prepare of job_1 \(rank 1: Prepared\)"),
    "1:hangs": ("RANK_STUCK", "rank 1 of 2 is 1 s late"),
    "0:fails 1:hangs": ("RANK_STUCK", r"rank 1 of 2 is 1 s late .*\(rank 0: X, said by 0\)"),
}


async def test_the_end_of_a_rank_is_one_death_and_the_next_group_works(tmp_path, monkeypatch):
    async with started(tmp_path, monkeypatch) as group:
        for prompt, (reason, message) in ENDS.items():
            pids = group.pids
            group.prepare(prompt)
            died = await group.next()
            assert (type(died), died.failure.reason) == (Died, reason), prompt
            assert re.search(message, died.failure.message), died.failure.message
            assert not any(map(psutil.pid_exists, pids)), "their devices are free when the death is told"
            assert os.listdir(tmp_path) == []
            with pytest.raises(Unavailable):
                group.prepare("x")
            assert isinstance(await group.start(), Ready)
        group.prepare("x")
        assert isinstance(await group.next(), Prepared)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_gives_no_sign_of_life_ends_all(tmp_path, monkeypatch, rank):
    """It is stopped, not dead. The toy gives no signs of life at all, so that the one which waits is not the issue."""
    async with started(tmp_path, monkeypatch, rank_timeout=60, worker_timeout=1) as group:
        os.kill(group.pids[rank], signal.SIGSTOP)
        died = await group.next()
        assert (type(died), died.failure.reason) == (Died, "WORKER_HUNG")
        assert not any(map(psutil.pid_exists, group.pids))


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_stops_in_its_load_does_not_keep_the_others_waiting_for_ever(tmp_path, monkeypatch, rank):
    """The other one is ready by then. A rank that has not begun to give signs of life may import for longer."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = configured(worker_timeout=60, phase_timeout=1)
    group = Group(RankExecutor(config, named(f"stopped {rank}"), [{}] * 2, worker=WORKER))
    died = await group.start()
    assert (type(died), died.failure.reason) == (Died, "WORKER_HUNG")
    assert f"rank {rank} of 2" in died.failure.message
    assert not any(map(psutil.pid_exists, group.pids))
    await group.executor.close()
    assert os.listdir(tmp_path) == []


async def test_a_group_that_hangs_is_killed_as_one(tmp_path, monkeypatch):
    async with started(tmp_path, monkeypatch) as group:
        group.executor.kill()
        died = await group.next()
        assert (died.failure.reason, "2 ranks" in died.failure.message) == ("WORKER_HUNG", True)


@pytest.mark.parametrize(("name", "reason"), [("broken 0", "X"), ("broken 1", "X"), ("other 1", "RANKS_DISAGREE")])
async def test_a_group_of_which_one_cannot_load_does_not_come_up(tmp_path, monkeypatch, name, reason):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    group = Group(RankExecutor(configured(), named(name), [{}] * 2, worker=WORKER))
    group.executor.start(group.reports.put_nowait)
    report = await group.next()
    while isinstance(report, Loading):
        report = await group.next()
    assert (type(report), report.failure.reason) == (Died, reason)
    await group.executor.close()
    assert group.reports.empty()
    assert os.listdir(tmp_path) == []


async def test_inputs_stay_until_all_ranks_have_read_them(tmp_path, monkeypatch):
    """The engine frees those of a request that is cancelled while it is prepared."""
    async with started(tmp_path, monkeypatch, rank_timeout=30) as group:
        block = f"omni-{os.getpid()}-input"
        shared.store(b"twelve bytes", block)
        picture = ImageInput(width=2, height=2, channels=3, data=b"", block=block)
        group.executor.submit(Plan(admit=(request("1:waits", inputs=Inputs(images=(picture,))),)))
        shared.discard(block)
        assert (await group.next()).rows == (12,)


async def test_a_group_for_a_model_of_the_hub_comes_once_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = configured()
    executor = HubExecutor(
        config,
        named("toy"),
        fetcher="tests.engine.toy_worker:fetches",
        make=lambda found: RankExecutor(config, found, [{}] * 2, worker=WORKER),
    )
    reports: asyncio.Queue = asyncio.Queue()
    executor.start(reports.put_nowait)
    got = []
    while not got or not isinstance(got[-1], Ready):
        got.append(await asyncio.wait_for(reports.get(), SOON))
    assert sum(isinstance(report, Fetched) for report in got) == 1
    await executor.close()
    assert os.listdir(tmp_path) == []


# --- which devices ----------------------------------------------------------------------------------------------------


def seen(monkeypatch: pytest.MonkeyPatch, visible: str | None, **settings: object) -> list[list[str]]:
    """What each process of each replica sees."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    made = executors(configured(**settings), toy_checkpoint())
    assert all(isinstance(one, RankExecutor) for one in made)
    return [[each.get("CUDA_VISIBLE_DEVICES", "all") for each in one._group[3]] for one in made]


def test_each_rank_of_each_replica_has_a_device_of_its_own(monkeypatch):
    two = {"data_parallel_size": 2}
    assert seen(monkeypatch, None) == [["0", "1"]]
    assert seen(monkeypatch, None, **two) == [["0", "1"], ["2", "3"]]
    assert seen(monkeypatch, "4,5,6,7", **two) == [["4", "5"], ["6", "7"]]
    assert seen(monkeypatch, "4,5,6,7", **two, devices="3,1,0,2") == [["7", "5"], ["4", "6"]]
    assert seen(monkeypatch, None, **two, device="cpu") == [["all", "all"]] * 2


@pytest.mark.parametrize(
    ("visible", "settings", "field"),
    [
        ("0,1", {"data_parallel_size": 2}, "data_parallel_size"),
        (None, {"devices": "0,1,2"}, "devices"),
        ("0,1", {"devices": "0,2"}, "devices"),
    ],
)
def test_devices_that_are_not_enough_are_refused_by_name(monkeypatch, visible, settings, field):
    with pytest.raises(ConfigError) as refused:
        seen(monkeypatch, visible, **settings)
    assert [violation.field for violation in refused.value.violations] == [field]
