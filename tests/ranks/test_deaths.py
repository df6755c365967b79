"""A rank that dies, stops, or fails alone, in each phase: all are started again, and jobs go on by the rules."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from omni_grpc.engine import JobState
from omni_grpc.types.events import Failed, Retrying
from tests.ranks.group import Served, serving, until
from tests.server.process import LONG, served

WORKER = "tests.ranks.paused:serve"
TIMEOUT = 3.0
"""Of a rank, in seconds: to answer, and to give a sign of life."""


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


async def _lost(served: Served, pauses: Path, phase: str, rank: int, end: Callable[[int], None]) -> None:
    """One job whose rank is ended in a phase, and the one after it."""
    (pauses / phase).touch()
    job = served.submit()
    # the second rank has no part in a decode, so the first one alone can be in it
    at = 0 if phase == "decode" else rank
    await until((pauses / f"{phase}.{at}").exists)
    pids, began = served.pids, time.monotonic()
    end(pids[rank])
    # a group ends as a whole, and the next one begins: how long that takes is bounded by the timeouts
    await until(lambda: not any(map(psutil.pid_exists, pids)))
    assert time.monotonic() - began < 4 * TIMEOUT
    for mark in os.listdir(pauses):
        (pauses / mark).unlink()
    await served.ready()
    await served.ended(job)
    told = [entry.event for entry in job.entries if isinstance(entry.event, Retrying | Failed)]
    assert len(told) == 1, told
    assert f"rank {rank} of 2" in told[0].failure.message
    assert told[0].failure.retryable
    assert (job.state is JobState.SUCCEEDED) == isinstance(told[0], Retrying)
    after = await served.ended(served.submit())
    assert after.failure is None


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
    assert os.listdir(tempfile.tempdir) == []


async def test_a_rank_that_fails_alone_ends_all(tiny_qwen_image: Path, pauses: Path) -> None:
    """In a prepare the others wait for its report, in a step in a collective."""
    async with serving(tiny_qwen_image, worker=WORKER, ulysses_degree=2, rank_timeout=TIMEOUT) as served:
        for phase, said in (("prepare", "disagree on its prepare"), ("step", "fails alone")):
            for rank in (0, 1):
                (pauses / f"fail-{phase}").write_text(str(rank))
                job = served.submit()
                await until(lambda job=job: any(isinstance(one.event, Retrying | Failed) for one in job.entries))
                (pauses / f"fail-{phase}").unlink()
                told = [one.event for one in job.entries if isinstance(one.event, Retrying | Failed)]
                assert said in told[0].failure.message, told
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
