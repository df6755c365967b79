"""A rank that dies, stops, or fails alone, in each phase: all are started again, and jobs go on by the rules."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from omni_grpc.engine import JobState
from omni_grpc.types.errors import OmniError
from omni_grpc.types.events import Failed, Retrying
from tests.ranks.group import Served, serving, until
from tests.server.process import LONG, served

WORKER = "tests.ranks.paused:serve"
TIMEOUT = 3.0
"""Of a rank, in seconds: to answer, and to give a sign of life."""
LOADING = 20.0
"""The same while it loads."""


@pytest.fixture
def pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, rendezvous = tmp_path / "pauses", tmp_path / "rendezvous"
    folder.mkdir()
    rendezvous.mkdir()
    monkeypatch.setenv("OMNI_TEST_PAUSES", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(rendezvous))
    return folder


def _killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


async def _ended(served: Served, rank: int, end: Callable[[int], None], soon: float) -> None:
    """Ends a rank: in so many seconds none of its group is left."""
    pids, began = served.pids, time.monotonic()
    end(pids[rank])
    await until(lambda: not any(map(psutil.pid_exists, pids)))
    assert time.monotonic() - began < soon


async def _lost(served: Served, pauses: Path, phase: str, rank: int, end: Callable[[int], None]) -> None:
    """One job whose rank is ended in a phase, and the one after it."""
    (pauses / phase).touch()
    job = served.submit()
    # the second rank has no part in a decode, so the first one alone can be in it
    at = 0 if phase == "decode" else rank
    await until((pauses / f"{phase}.{at}").exists)
    # a group ends as a whole, and the next one begins: how long that takes is bounded by the timeouts
    await _ended(served, rank, end, 4 * TIMEOUT)
    go_on(pauses)
    await served.ready()
    await served.ended(job)
    told = [entry.event for entry in job.entries if isinstance(entry.event, Retrying | Failed)]
    assert len(told) == 1, told
    assert f"rank {rank} of 2" in told[0].failure.message
    assert told[0].failure.retryable
    assert (job.state is JobState.SUCCEEDED) == isinstance(told[0], Retrying)
    after = await served.ended(served.submit())
    assert after.failure is None


@pytest.mark.timeout(500)  # eight groups, one after the other
@pytest.mark.parametrize("end", [_killed, _stopped])
async def test_the_loss_of_a_rank_ends_all_and_the_next_job_succeeds(
    tiny_qwen_image: Path, pauses: Path, end: Callable[[int], None]
) -> None:
    settings = {"ulysses_degree": 2, "rank_timeout": 60.0, "worker_timeout": TIMEOUT}
    async with serving(tiny_qwen_image, worker=WORKER, **settings) as served:
        for phase in ("prepare", "step", "decode"):
            for rank in (0, 1):
                await _lost(served, pauses, phase, rank, end)
        assert served.engine.stats().worker_restarts == 6
        for rank in (0, 1):
            await _ended(served, rank, end, 4 * TIMEOUT)
            await served.ready()
            assert (await served.ended(served.submit())).failure is None
    assert os.listdir(tempfile.tempdir) == []


def go_on(pauses: Path) -> None:
    for mark in os.listdir(pauses):
        (pauses / mark).unlink()


@pytest.mark.parametrize(
    ("phase", "rank", "end"),
    [("load", 0, _killed), ("load", 1, _stopped), ("warm-up", 1, _killed), ("warm-up", 0, _stopped)],
)
@pytest.mark.timeout(300)
async def test_a_group_that_loses_a_rank_while_it_is_started_again_is_started_once_more(
    tiny_qwen_image: Path, pauses: Path, phase: str, rank: int, end: Callable[[int], None]
) -> None:
    """A job that comes meanwhile waits. In the load each rank is by itself, in the warm-up the others wait for it."""
    settings = {"ulysses_degree": 2, "worker_timeout": TIMEOUT, "phase_timeout": LOADING, "warm_up_seconds": 0.2}
    async with serving(tiny_qwen_image, worker=WORKER, **settings) as served:
        (pauses / phase).write_text(str(rank))
        await _ended(served, 1 - rank, _killed, 4 * TIMEOUT)
        job = served.submit()
        await until((pauses / f"{phase}.{rank}").exists)
        await _ended(served, rank, end, LOADING + 4 * TIMEOUT)
        assert f"rank {rank} of 2" in served.engine._replicas[0].failure.message
        assert job.state is JobState.QUEUED
        go_on(pauses)
        assert (await served.ended(job)).failure is None
        assert served.engine.stats().worker_restarts == 2
    assert os.listdir(tempfile.tempdir) == []


async def test_a_rank_that_dies_in_the_first_load_keeps_the_engine_from_its_start(
    tiny_qwen_image: Path, pauses: Path
) -> None:
    async def start() -> None:
        async with serving(tiny_qwen_image, worker=WORKER, ulysses_degree=2):
            pass

    (pauses / "load").touch()
    # another file's fixtures may have workers of their own
    before = set(psutil.Process().children())
    starting = asyncio.ensure_future(start())
    await until((pauses / "load.1").exists)
    begun = [child for child in psutil.Process().children() if child not in before]
    ranks = [child for child in begun if "spawn_main" in str(child.cmdline())]
    assert len(ranks) == 2
    ranks[0].kill()
    with pytest.raises(OmniError, match=r"rank 0 of 2, process \d+ died by signal SIGKILL"):
        await asyncio.wait_for(starting, 4 * TIMEOUT)
    gone, alive = psutil.wait_procs(ranks, 4 * TIMEOUT)
    assert (len(gone), alive) == (2, [])
    assert os.listdir(tempfile.tempdir) == []


@pytest.mark.timeout(300)
async def test_a_rank_that_fails_alone_ends_all(tiny_qwen_image: Path, pauses: Path) -> None:
    """In a step the others wait for it in a collective; in a prepare too, for the first one, which encodes."""
    async with serving(tiny_qwen_image, worker=WORKER, ulysses_degree=2, rank_timeout=TIMEOUT) as served:
        for phase in ("prepare", "step"):
            for rank in (0, 1):
                (pauses / f"fail-{phase}").write_text(str(rank))
                job = served.submit()
                await until(lambda job=job: any(isinstance(one.event, Retrying | Failed) for one in job.entries))
                (pauses / f"fail-{phase}").unlink()
                told = [one.event for one in job.entries if isinstance(one.event, Retrying | Failed)]
                assert f"rank {rank} fails alone" in told[0].failure.message, told
                await served.ready()
                await served.ended(job)
                assert (await served.ended(served.submit())).failure is None
        # in a decode, nobody waits for the rank that fails, and it is the job's failure alone
        restarts = served.engine.stats().worker_restarts
        (pauses / "fail-decode").write_text("0")
        job = await served.ended(served.submit())
        assert "rank 0 fails alone" in job.failure.message
        (pauses / "fail-decode").unlink()
        assert (await served.ended(served.submit())).failure is None
        assert served.engine.stats().worker_restarts == restarts
    assert os.listdir(tempfile.tempdir) == []


@pytest.mark.service
def test_the_ranks_of_a_server_that_was_killed_end_in_the_middle_of_a_job(
    tiny_qwen_image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may be in a collective that another one has left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with served(tiny_qwen_image, tmp_path, "--device", "cpu", "--warm-up-seconds", "0", "--usp", "2") as server:
        steps = (one for one in server.generation.GenerateImage(server.image(**LONG)) if one.event.step_progress.step)
        next(steps)
        assert list(tmp_path.glob("omni-ranks-*"))
        ranks = [child for child in psutil.Process(server.popen.pid).children() if "spawn_main" in str(child.cmdline())]
        assert len(ranks) == 2
        server.popen.kill()
        server.popen.wait()
        gone, alive = psutil.wait_procs(ranks, 20)
        assert (len(gone), alive) == (2, [])
        assert not list(tmp_path.glob("omni-ranks-*"))
