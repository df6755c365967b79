"""A server whose jobs are kept: what callers are told is committed, and what a server has left is gone on with."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc import aio

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.engine.scheduler import Lane
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.server import Server
from omni_grpc.store.job import new_job_id
from omni_grpc.store.open import open_storage
from omni_grpc.store.records import Entry, JobState, JobWrite, KeptInput, StoredJob
from omni_grpc.store.seam import Notice, StoreError
from omni_grpc.types import events
from omni_grpc.types.errors import Code, Failure
from omni_grpc.v1 import job_pb2
from tests.store.samples import record

from .fake_executor import FakeExecutor
from .service import CHECKPOINT, Service, image, kinds, refusal, until

pytestmark = pytest.mark.service

LOST = Failure(code=Code.UNAVAILABLE, reason="SERVER_RESTARTED", message="x")


@contextlib.asynccontextmanager
async def kept(folder: Path) -> AsyncIterator[Service]:
    config = EngineConfig.from_settings(model="toy", port=0, state_dir=str(folder))
    executor = FakeExecutor()
    engine = Engine(config, CHECKPOINT, executor, open_storage(config))
    server = Server(Gate(Fleet.of(engine)), config)
    await server.start()
    service = Service(engine, server, executor)
    try:
        yield service
    finally:
        await service.channel.close()
        await server.stop()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with kept(tmp_path) as running:
        yield running


class Held:
    """Writes of jobs wait until they are let go, or fail then."""

    def __init__(self, service: Service) -> None:
        self._rows = service.engine.storage.store.jobs
        self._write = self._rows.write
        self._open = asyncio.Event()
        self.came = asyncio.Event()
        self.error: StoreError | None = None
        self._rows.write = self.write  # type: ignore[method-assign]

    async def write(self, writes):
        self.came.set()
        await self._open.wait()
        if self.error is not None:
            raise self.error
        return await self._write(writes)

    def let(self, error: StoreError | None = None) -> None:
        self.error = error
        self._open.set()


def asking(request_id: str) -> job_pb2.CreateJobRequest:
    return job_pb2.CreateJobRequest(generate_image=image(options={"request_id": request_id}))


async def test_a_repeated_request_waits_for_the_commit_of_the_first(service: Service) -> None:
    held = Held(service)
    first = service.jobs.CreateJob(asking("a"))
    waiting = asyncio.ensure_future(_result(first))
    await held.came.wait()
    again = asyncio.ensure_future(_result(service.jobs.CreateJob(asking("a"))))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert not again.done(), "it was told of a job that a crash would lose"
    listed = await service.jobs.ListJobs(job_pb2.ListJobsRequest())
    assert list(listed.jobs) == [], "nobody knows of it before it is committed"
    held.let()
    one, two = await waiting, await again
    assert one.job.job_id == two.job.job_id
    assert (one.deduplicated, two.deduplicated) == (False, True)


async def test_a_repeated_request_is_refused_with_the_first(service: Service) -> None:
    held = Held(service)
    first = asyncio.ensure_future(_refused(service, "a"))
    await held.came.wait()
    again = asyncio.ensure_future(_refused(service, "a"))
    await asyncio.sleep(0.1)
    held.let(StoreError("the disk is full"))
    assert await first == await again == "STORE_UNAVAILABLE"


async def test_a_client_that_leaves_leaves_no_job_that_could_not_be_kept(service: Service) -> None:
    service.executor.gates[Lane.PREPARE].close()
    held = Held(service)
    call = service.jobs.CreateJob(asking("a"))
    waiting = asyncio.ensure_future(_result(call))
    await held.came.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0.1)
    assert service.engine.stats().queued + service.engine.stats().running == 1
    held.let(StoreError("the disk is full"))
    await until(lambda: service.engine.stats().queued + service.engine.stats().running == 0)


async def test_a_job_on_its_way_to_the_store_is_not_lost_with_the_lease(service: Service) -> None:
    held = Held(service)
    waiting = asyncio.ensure_future(_result(service.jobs.CreateJob(asking("a"))))
    await held.came.wait()
    await service.server._gate._sharing._find_lost()
    held.let()
    job_id = (await waiting).job.job_id
    assert kinds(await service.watch(job_id))[-1] == "completed"


async def test_events_of_an_attempt_are_timed_from_its_start(service: Service) -> None:
    service.executor.gates[Lane.STEP].close()
    job_id = (await service.create()).job_id
    job = service.engine.jobs.get(job_id)
    await until(lambda: job.last_seq == 3)
    job.append(events.Retrying(failure=LOST, attempt=2, max_attempts=2, delay=0.0))
    await service.engine.storage.journal.settled(job_id)
    call = service.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=job_id))
    seen = [(await call.read()).event for _ in range(4)]
    call.cancel()
    assert kinds(seen) == ["queued", "started", "encode_done", "retrying"]
    elapsed = seen[2].time.ToNanoseconds() - seen[1].time.ToNanoseconds()
    assert abs(seen[2].encode_done.elapsed.ToNanoseconds() - elapsed) < 1000
    message = await service.get(job_id)
    assert (message.step, message.HasField("start_time")) == (0, False)


async def test_one_job_that_cannot_be_gone_on_with_does_not_keep_the_others(tmp_path: Path) -> None:
    async with kept(tmp_path) as service:
        service.executor.gates[Lane.PREPARE].close()
        # the first one has started, and ends with the server
        ids = [(await service.create()).job_id for _ in range(3)][1:]
        rows = service.engine.storage.store.jobs
        (broken,) = await rows.read([ids[0]])
        # its input is no URI: a file that somebody has damaged
        await service.engine.storage.blobs.put("input-1", _pieces(b"\xff\xfe"))
        spoiled = KeptInput(blob="input-1", path="images[0]", name="images", as_uri=True)
        name = new_job_id()
        spec = dataclasses.replace(
            broken.record.spec, inputs=(spoiled,), request=dataclasses.replace(broken.record.spec.request, id=name)
        )
        other = dataclasses.replace(broken.record, id=name, spec=spec, reserved_seq=1)
        await rows.write([JobWrite(record=other, entries=broken.entries, created=True)])
    async with kept(tmp_path) as service:
        ended = [kinds(await service.watch(job_id))[-1] for job_id in (*ids, name)]
        assert ended == ["completed", "completed", "failed"]
        failed = (await service.watch(name))[-1].failed
        assert "UnicodeDecodeError" in failed.status.message
        # another server may still store what it has made of it: its outputs have other names
        names = [one.artifact_id for job_id in ids for one in (await service.get(job_id)).artifacts]
        assert [part.split("_")[-2] for part in names] == ["r1"] * 2


async def test_progress_is_shown_behind_what_happened_before_it(service: Service) -> None:
    rows, sharing = service.engine.storage.store.jobs, service.server._gate._sharing
    theirs = record(1, server="other", state=JobState.RUNNING, reserved_seq=300)
    queued = Entry(1, 1.0, events.Queued(position=0, queue_depth=0))
    await rows.write([JobWrite(record=theirs, entries=(queued,), created=True)])
    job = await service.engine.jobs.find(theirs.id)
    more = (
        Entry(2, 2.0, events.Started(model="m", seeds=(1,), width=16, height=16, total_steps=3, queue_wait=0.0)),
        Entry(3, 3.0, events.EncodeDone(elapsed=0.1, prompt_tokens=1)),
    )
    await rows.write([JobWrite(record=theirs, entries=more)])
    sharing._hear(Notice(job_id=job.id, seq=3, progress=Entry(4, 4.0, step(1))))
    await until(lambda: job.last_seq == 4)
    assert [entry.seq for entry in job.entries] == [1, 2, 3, 4]
    sharing._hear(Notice(job_id=job.id, seq=3, progress=Entry(5, 5.0, step(2))))
    assert job.last_seq == 5
    # an answer that was read before these
    job.catch_up(StoredJob(dataclasses.replace(theirs, state=JobState.QUEUED), (queued,)))
    assert (job.state, job.last_seq, job.kept_seq) == (JobState.RUNNING, 5, 3)


async def test_a_look_at_a_job_that_was_taken_over_changes_nothing(service: Service) -> None:
    service.executor.gates[Lane.PREPARE].close()
    job = service.engine.jobs.get((await service.create()).job_id)
    before = job.appended_seq
    await service.server._gate._sharing._refresh(job)
    assert job.appended_seq == before


def step(number: int) -> events.StepProgress:
    return events.StepProgress(
        step=number, total_steps=3, sigma=1.0, timestep=1.0, step_time=0.1, elapsed=0.1, eta=0.1, rows_total=1
    )


async def _result(call: aio.UnaryUnaryCall) -> job_pb2.CreateJobResponse:
    return await call


async def _refused(service: Service, request_id: str) -> str:
    return (await refusal(service.jobs.CreateJob(asking(request_id)))).reason


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data
