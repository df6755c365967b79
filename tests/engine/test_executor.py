import asyncio
import dataclasses
import multiprocessing
import os
import signal
import struct
from pathlib import Path

import psutil
import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, Submission
from omni_grpc.engine import executor as executor_module
from omni_grpc.engine.executor import HubExecutor, LocalExecutor, ProcessExecutor
from omni_grpc.engine.status import EngineState
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, Failure, Unavailable
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.plan import Died, Fetched, Plan, Prepared, Ready
from omni_grpc.types.request import Draft
from tests.engine import toy_worker
from tests.engine.manual import ask, names
from tests.server.service import CHECKPOINT, until
from tests.toy import toy_checkpoint

CONFIG = EngineConfig.from_settings(model="toy")


def request(prompt="four"):
    draft = Draft(model="toy", prompt=prompt)
    return resolve_request(draft, ServingFacts(toy_checkpoint(), CONFIG.limits), id="job_1").request


def process(name="toy", worker="tests.engine.toy_worker:serve"):
    executor = ProcessExecutor(CONFIG, _named(name), worker=worker)
    reports: asyncio.Queue = asyncio.Queue()
    executor.start(reports.put_nowait)
    return executor, reports


def _named(name):
    # functions do not pickle by value: only module-level ones may be in a spec that travels
    checkpoint = toy_checkpoint(limits=str, defaults=str)
    return dataclasses.replace(checkpoint, name=name)


async def test_plans_and_reports_cross_the_process_boundary():
    executor, reports = process()
    ready = await reports.get()
    assert isinstance(ready, Ready)
    assert ready.pid == executor.pid != psutil.Process().pid
    executor.submit(Plan(admit=(request(),)))
    assert await reports.get() == Prepared(id="job_1", elapsed=0.0, prompt_tokens=4)
    await executor.close()
    assert not psutil.pid_exists(ready.pid)
    assert reports.empty(), "a worker that was asked to end is not a death"


async def test_ctrl_c_does_not_reach_the_worker():
    executor, reports = process()
    await reports.get()
    executor.submit(Plan(decode=("job_1",)))
    assert (await reports.get()).failure.message == "SIG_IGN"
    await executor.close()


async def test_a_signal_to_the_whole_group_does_not_reach_the_worker():
    """What a service manager or a closed terminal sends to every process; the server decides what becomes of them."""
    executor, reports = process()
    pid = (await reports.get()).pid
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    executor.submit(Plan(admit=(request(),)))
    assert await reports.get() == Prepared(id="job_1", elapsed=0.0, prompt_tokens=4)
    await executor.close()
    assert not psutil.pid_exists(pid)


async def test_a_killed_worker_is_reported_and_its_shared_memory_freed():
    executor, reports = process("dies")
    await reports.get()
    executor.submit(Plan(admit=(request(),)))
    died = await reports.get()
    assert isinstance(died, Died)
    assert died.failure.code is Code.UNAVAILABLE
    assert "SIGKILL" in died.failure.message
    assert shared.sweep(executor._process._prefix) == 0, "nothing was left to free"
    with pytest.raises(Unavailable):
        executor.submit(Plan(step=("job_1",)))
    await executor.close()


async def test_a_plan_for_a_worker_that_has_just_been_killed_goes_to_the_next_one():
    """The death is known by the broken pipe before the loop hears of it: the job keeps its place and its one retry."""
    config = EngineConfig.from_settings(model="toy", restart_backoff=0)
    executor = ProcessExecutor(config, _named("toy"), worker="tests.engine.toy_worker:serve")
    engine = Engine(config, toy_checkpoint(), executor)
    await engine.start()
    worker = psutil.Process(executor.pid)
    worker.kill()
    worker.wait(60)
    jobs = [ask(engine), ask(engine)]
    assert [names(job) for job in jobs] == [["Queued"]] * 2, "the loop has not run since"
    assert [engine.queue_position(job) for job in jobs] == [0, 1]
    async with asyncio.timeout(60):
        while "EncodeDone" not in names(jobs[1]):  # noqa: ASYNC110 (of what the toy worker does no event tells)
            await asyncio.sleep(0.01)
    assert executor.pid != worker.pid
    assert [names(job)[:3] for job in jobs] == [["Queued", "Started", "EncodeDone"]] * 2
    assert engine.stats().worker_restarts == 1
    await engine.close()


async def test_a_worker_that_exits_is_reported_with_its_code():
    executor, reports = process(worker="tests.engine.toy_worker:exits")
    assert "exit code 3" in (await reports.get()).failure.message
    await executor.close()


async def test_a_worker_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(executor_module, "CLOSE_SECONDS", 0.3)
    executor, reports = process("stubborn")
    pid = (await reports.get()).pid
    await executor.close()
    assert not psutil.pid_exists(pid)


class LocalToy:
    def __init__(self, config, checkpoint, send, prefix):
        self.config, self.send, self.closed = config, send, False

    def start(self):
        self.send(Ready(pid=0, device="cpu", dtype="float32", load_seconds=0.0, weight_bytes=0))

    def submit(self, plan):
        self.send(Prepared(id=plan.admit[0].id, elapsed=0.0, prompt_tokens=1))

    def close(self):
        self.closed = True


class LocalLost(LocalToy):
    """Its device is lost at the first request."""

    def submit(self, plan):
        if plan.admit:
            failure = Failure(code=Code.UNAVAILABLE, reason="DEVICE_LOST", message="the GPU is lost to this process")
            self.send(Died(failure=failure))


async def test_a_device_lost_in_the_callers_process_fails_all_jobs_and_new_ones_at_once():
    """No new worker could do better there, so that waiting for one would be for ever."""
    executor = LocalExecutor(CONFIG, toy_checkpoint(), worker="tests.engine.test_executor:LocalLost")
    engine = Engine(CONFIG, CHECKPOINT, executor)
    await engine.start()
    submission = Submission(draft=Draft(model="toy", prompt="x"))
    jobs = [engine.submit(submission)[0] for _ in range(CONFIG.scheduler.max_num_seqs + 2)]
    await until(lambda: all(job.state.terminal for job in jobs))
    assert {job.failure.reason for job in jobs} == {"DEVICE_LOST"}
    assert engine.state is EngineState.FAILED
    with pytest.raises(Unavailable, match="the GPU is lost to this process; start a new process") as refused:
        engine.submit(submission)
    assert refused.value.reason == "ENGINE_FAILED"
    await engine.close()


async def test_the_local_executor_delivers_on_the_loop():
    executor = LocalExecutor(CONFIG, toy_checkpoint(), worker="tests.engine.test_executor:LocalToy")
    reports: asyncio.Queue = asyncio.Queue()
    executor.start(reports.put_nowait)
    assert isinstance(await reports.get(), Ready)
    executor.submit(Plan(admit=(request(),)))
    assert (await reports.get()).id == "job_1"
    await executor.close()
    assert executor._worker.closed


@pytest.mark.parametrize(
    ("tokens", "alone", "got"), [(None, False, 0), (None, True, None), (64, False, 64), (0, True, 0)]
)
async def test_in_the_callers_process_there_are_no_cuda_graphs_unless_they_are_asked_for(tokens, alone, got):
    """A batch could not be captured beside the caller's own work, which would fail with it."""
    config = EngineConfig.from_settings(model="toy", cuda_graph_tokens=tokens)
    executor = LocalExecutor(config, toy_checkpoint(), worker="tests.engine.test_executor:LocalToy", alone=alone)
    executor.start(lambda report: None)
    assert executor._worker.config.worker.cuda_graph_tokens == got
    await executor.close()


# --- models of the hub ------------------------------------------------------------------------------------------------


def hub(fetcher):
    executor = HubExecutor(CONFIG, _named("toy"), fetcher=fetcher, worker="tests.engine.toy_worker:serve")
    reports: asyncio.Queue = asyncio.Queue()
    executor.start(reports.put_nowait)
    return executor, reports


async def test_a_model_is_fetched_once_and_then_has_a_worker_like_any_other():
    executor, reports = hub("tests.engine.toy_worker:fetches")
    assert await reports.get() == Loading(phase=LoadPhase.DOWNLOADING)
    assert await reports.get() == Loading(phase=LoadPhase.DOWNLOADING, done_bytes=5, total_bytes=10)
    fetched = await reports.get()
    assert isinstance(fetched, Fetched)
    assert fetched.checkpoint.path == Path("here")
    assert await reports.get() == Loading(phase=LoadPhase.LOADING)
    assert isinstance(await reports.get(), Ready)
    executor.submit(Plan(admit=(request(),)))
    assert await reports.get() == Prepared(id="job_1", elapsed=0.0, prompt_tokens=4)
    executor.kill()
    assert isinstance(await reports.get(), Died)
    executor.start(reports.put_nowait)
    assert isinstance(await reports.get(), Ready)
    await executor.close()
    assert reports.empty(), "the end of the fetch was no death"


async def test_a_fetch_that_ends_without_a_word_is_a_death():
    executor, reports = hub("tests.engine.toy_worker:exits")
    assert isinstance(await reports.get(), Loading)
    died = await reports.get()
    assert (died.failure.reason, "exit code 3" in died.failure.message) == ("WORKER_DIED", True)
    await executor.close()


async def test_a_model_that_comes_while_the_executor_is_closed_gets_no_worker():
    executor, reports = hub("tests.engine.toy_worker:serve")  # it waits for plans, as a fetch waits for bytes
    await executor.close()
    while not reports.empty():
        reports.get_nowait()
    executor._on_fetch(Fetched(checkpoint=toy_checkpoint()))
    assert executor._inner is executor._fetcher
    assert reports.empty()


# --- a pipe that ends in the middle -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("worker", "reason"), [("half", "WORKER_DIED"), ("garbage", "WORKER_ERROR")])
async def test_a_report_that_cannot_be_read_is_a_death(worker, reason):
    executor, reports = process(worker=f"tests.engine.toy_worker:{worker}")
    pid = (await reports.get()).pid
    died = await asyncio.wait_for(reports.get(), 30)
    assert (type(died), died.failure.reason) == (Died, reason)
    assert not psutil.pid_exists(pid)
    await executor.close()


async def test_reports_that_came_before_a_death_keep_their_blocks():
    executor = ProcessExecutor(CONFIG, _named("puts"), worker="tests.engine.toy_worker:puts")
    came: asyncio.Queue = asyncio.Queue()
    executor.start(lambda report: came.put_nowait(report if isinstance(report, Died) else shared.take(report.data)))
    # the loop is busy while the worker dies and its end is noticed
    executor._process._reader.join(60)
    assert await came.get() == b"the first"
    assert await came.get() == b"the second"
    assert isinstance(await came.get(), Died)
    assert shared.sweep(executor._process._prefix) == 0, "nothing was left to free"
    await executor.close()


async def test_a_process_that_cannot_be_started_is_a_death(monkeypatch):
    def refuse(*arguments):
        raise OSError(11, "Resource temporarily unavailable")

    executor, reports = ProcessExecutor(CONFIG, _named("toy")), asyncio.Queue()
    monkeypatch.setattr(executor_module, "WorkerProcess", refuse)
    executor.start(reports.put_nowait)
    died = await reports.get()
    assert (died.failure.reason, died.failure.retryable) == ("WORKER_NOT_STARTED", True)
    assert "there are not enough processes or memory left" in died.failure.message
    with pytest.raises(Unavailable):
        executor.submit(Plan(step=("job_1",)))
    await executor.close()


def test_a_worker_ends_when_a_plan_breaks_off():
    """Its engine was killed in the middle of it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=toy_worker.idle, args=(theirs,))
    worker.start()
    theirs.close()
    assert ours.recv() == "ready"
    os.write(ours.fileno(), struct.pack("!i", 1000) + b"half")
    ours.close()
    worker.join(60)
    assert worker.exitcode == 0


@pytest.mark.parametrize("name", ["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"])
@pytest.mark.parametrize(("own", "expected"), [(None, "128"), ("7", "7")])
async def test_a_worker_bounds_what_onednn_keeps_unless_the_user_has(monkeypatch, name, own, expected):
    if own is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, own)
    executor, reports = process(name, worker="tests.engine.toy_worker:environment")
    assert (await reports.get()).failure.message == expected
    assert os.environ.get(name) == own, "of the worker's process alone"
    await executor.close()
