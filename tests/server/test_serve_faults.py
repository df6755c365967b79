"""What happens to a real server: its worker dies or hangs, jobs are cancelled, clients vanish, it is asked to stop."""

import contextlib
import io
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import PIL.Image
import psutil
import pytest

from omni_grpc.v1 import admin_pb2, event_pb2, job_pb2

from .process import LONG, ROOT, Process, data_of, served
from .service import kinds, read_refusal

pytestmark = pytest.mark.service

ENDLESS = {"steps": 2000}
"""More than any test waits for."""
FLAGS = (
    "--max-steps",
    "2000",
    "--max-num-seqs",
    "4",
    "--worker-timeout",
    "3",
    "--restart-backoff",
    "0.1",
    "--warm-up-seconds",
    "0",
)
SERVING, NOT_SERVING = 1, 2


@pytest.fixture(scope="module")
def server(tiny_qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with served(tiny_qwen_image, tmp_path_factory.mktemp("faults"), *FLAGS) as running:
        yield running


@pytest.fixture(autouse=True)
def healthy(server: Process) -> None:
    """A test does not begin while the worker of the one before comes back."""
    until(lambda: server.health() == SERVING)


@contextlib.contextmanager
def frozen(worker: psutil.Process) -> Iterator[None]:
    worker.suspend()
    try:
        yield
    finally:
        worker.resume()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def outcome(call) -> tuple[str, str, event_pb2.JobEvent]:
    """Reads a generation to its end: code and reason of its status, and the last event."""
    event = event_pb2.JobEvent()
    with pytest.raises(grpc.RpcError) as caught:  # noqa: PT012 (the call ends inside of the loop)
        for message in call:
            event = message.event
    error = read_refusal(caught.value)
    return error.code, error.reason, event


def at_first_step(call) -> event_pb2.JobEvent:
    return next(message.event for message in call if message.event.HasField("step_progress"))


def restarts(server: Process) -> int:
    return server.admin.GetServerStats(admin_pb2.GetServerStatsRequest()).stats.worker_restarts


# --- the worker -------------------------------------------------------------------------------------------------------


def test_a_killed_worker_takes_its_jobs_along_and_no_others(server):
    before, image = restarts(server), data_of(server.generate())
    calls = [server.generation.GenerateImage(server.image(**ENDLESS)) for _ in range(4)]
    first = [at_first_step(call) for call in calls]
    waiting = server.create(server.image())
    assert server.job(waiting).state == event_pb2.JOB_STATE_QUEUED
    server.worker().kill()
    fifth = server.create(server.image())
    for call, event in zip(calls, first, strict=True):
        code, reason, last = outcome(call)
        assert (code, reason) == ("UNAVAILABLE", "WORKER_DIED")
        assert (last.failed.retryable, last.job_id) == (True, event.job_id)
        assert server.watch(event.job_id)[-1] == last, "what the server kept can still be read"
    assert (server.health(), server.health("liveness")) == (NOT_SERVING, SERVING)
    for job_id in (waiting, fifth):
        events = server.watch(job_id, delivery="ARTIFACT_DELIVERY_INLINE_CHUNKS")
        assert kinds(events)[-1] == "completed"
        # the two share steps, for which libraries may round otherwise
        shades = [np.asarray(PIL.Image.open(io.BytesIO(made))).astype(int) for made in (data_of(events), image)]
        assert np.abs(shades[0] - shades[1]).max() <= 1, "the new worker makes the same"
    until(lambda: server.health() == SERVING)
    assert restarts(server) == before + 1


def test_a_job_that_is_made_before_the_death_is_known_goes_to_the_next_worker(server):
    image, worker = data_of(server.generate()), server.worker()
    worker.suspend()  # it takes the job and does nothing with it, as one does that is being killed
    job_id = server.create(server.image())
    until(lambda: server.job(job_id).state == event_pb2.JOB_STATE_RUNNING)
    with contextlib.suppress(psutil.NoSuchProcess):  # on a machine so slow that it was found hanging before
        worker.kill()
    events = server.watch(job_id, delivery="ARTIFACT_DELIVERY_INLINE_CHUNKS")
    kept = kinds([event for event in events if event.seq])
    assert (kept[:5], kept[-1]) == (["queued", "started", "retrying", "queued", "started"], "completed")
    assert data_of(events) == image


def test_a_worker_that_shows_no_sign_of_life_is_killed_and_replaced(server):
    before, worker = restarts(server), server.worker()
    call = server.generation.GenerateImage(server.image(**ENDLESS))
    at_first_step(call)
    worker.suspend()
    code, reason, last = outcome(call)
    assert (code, reason, last.failed.retryable) == ("UNAVAILABLE", "WORKER_HUNG", True)
    assert not worker.is_running()
    assert kinds(server.watch(server.create(server.image())))[-1] == "completed"
    assert restarts(server) == before + 1


# --- cancelling -------------------------------------------------------------------------------------------------------


def cancelled(server: Process, job_id: str) -> list[event_pb2.JobEvent]:
    """The events of a job that is cancelled now."""
    job = server.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=job_id)).job
    assert (job.state, job.cancel_requested) == (event_pb2.JOB_STATE_CANCELLED, True)
    return server.watch(job_id)


def test_a_cancel_in_queue_and_in_encode_does_not_wait_for_the_worker(server):
    with frozen(server.worker()):
        encoding, queued = [server.create(server.image()) for _ in range(2)]
        assert kinds(cancelled(server, queued)) == ["queued", "cancelled"]
        assert kinds(cancelled(server, encoding)) == ["queued", "started", "cancelled"]
    assert kinds(server.generate())[-1] == "completed"


def test_a_cancel_in_a_step_does_not_wait_for_its_end(server):
    call = server.generation.GenerateImage(server.image(**ENDLESS))
    event = at_first_step(call)
    with frozen(server.worker()):
        # no step can end from here on; those that had ended may still be on their way through the pipe
        steps = server.job(event.job_id).step
        events = cancelled(server, event.job_id)
    assert steps <= events[-1].cancelled.completed_steps <= steps + 2
    assert outcome(call)[:2] == ("CANCELLED", "JOB_CANCELLED")
    assert kinds(server.generate())[-1] == "completed"


def test_a_cancel_in_decode_drops_the_outputs(server):
    request = server.image(steps=1)
    request.width = request.height = 512
    call = server.generation.GenerateImage(request)
    event = next(message.event for message in call if message.event.HasField("decode_progress"))
    events = cancelled(server, event.job_id)
    assert kinds(events)[-2:] == ["decode_progress", "cancelled"]
    assert events[-1].cancelled.completed_steps == 1
    assert list(server.job(event.job_id).artifacts) == []
    assert outcome(call)[:2] == ("CANCELLED", "JOB_CANCELLED")
    assert kinds(server.generate())[-1] == "completed", "the lane is free again"


# --- clients ----------------------------------------------------------------------------------------------------------


def follower(server: Process, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.server.follower", server.address, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def read(line: str) -> tuple[int, str, int, str]:
    seq, kind, coalesced, job_id = line.split()
    return int(seq), kind, int(coalesced), job_id


def test_a_new_process_goes_on_where_a_killed_client_stopped(server):
    client = follower(server, "generate", server.model)
    assert client.stdout is not None
    seen = [read(client.stdout.readline()) for _ in range(8)]
    client.kill()
    # what it had printed before it was killed, it has seen
    seen += [read(line) for line in client.stdout if line.endswith("\n")]
    client.wait()
    last, job_id = seen[-1][0], seen[-1][3]
    assert server.job(job_id).state == event_pb2.JOB_STATE_RUNNING
    output, _ = follower(server, "watch", job_id, last).communicate(timeout=60)
    rest = [read(line) for line in output.splitlines()]
    place = last
    for seq, _, coalesced, _ in rest:
        assert seq == place + 1 + coalesced, "nothing twice, nothing lost that is not counted"
        place = seq
    assert {job for *_, job in rest} == {job_id}
    states = [kind for _, kind, _, _ in (*seen, *rest) if kind != "step_progress"]
    assert states == ["queued", "started", "encode_done", "decode_progress", "artifact_ready", "completed"]
    assert place == server.job(job_id).last_seq


# --- the end, so this is the last test of the module ------------------------------------------------------------------


def test_a_server_that_is_asked_to_stop_lets_its_jobs_end(server):
    call = server.generation.GenerateImage(server.image(**LONG))
    events = [at_first_step(call)]
    server.popen.send_signal(signal.SIGTERM)
    events += [message.event for message in call]
    assert kinds(events)[-1] == "completed"
    assert events[-1].completed.stats.steps_run == 200
    assert server.stop() == (0, ""), "one line on stdout in all its life"
    log = server.log.read_text()
    assert "READY -> DRAINING" in log
    assert "a red circle" not in log, "prompts are not logged"
    assert "Traceback" not in log
