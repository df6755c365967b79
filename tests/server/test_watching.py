"""WatchJob and WatchJobs: places, paces, resuming, and many jobs on one stream."""

import asyncio
from itertools import pairwise

import pytest
from grpc import aio

from omni_grpc.client.channel import DIRECT
from omni_grpc.engine import Entry
from omni_grpc.engine.scheduler import Lane
from omni_grpc.gate import jobs as gate_jobs
from omni_grpc.gate.follow import Pace
from omni_grpc.gate.jobs import Newcomers
from omni_grpc.types.events import DecodeProgress, EncodeDone, StepProgress
from omni_grpc.v1 import job_pb2, job_pb2_grpc

from .service import image, kinds, refusal, serving, to_error, until


async def test_a_watcher_that_comes_back_gets_exactly_what_it_missed(service):
    job = await service.finished(sampling={"steps": 5})
    whole = await service.watch(job.job_id)
    assert [event.seq for event in whole] == list(range(1, job.last_seq + 1))
    for after_seq in range(job.last_seq + 1):
        assert await service.watch(job.job_id, after_seq=after_seq) == whole[after_seq:]


async def test_two_watchers_see_the_same_events_in_the_same_order(service):
    service.executor.gates[Lane.STEP].close()
    job = await service.create()
    early = asyncio.create_task(service.watch(job.job_id))
    await until(lambda: service.engine.jobs.get(job.job_id).watchers == 1)
    service.executor.gates[Lane.STEP].let(1)
    late = asyncio.create_task(service.watch(job.job_id))
    await until(lambda: service.engine.jobs.get(job.job_id).watchers == 2)
    service.executor.gates[Lane.STEP].open()
    first, second = await asyncio.gather(early, late)
    assert first == second
    assert [event.seq for event in first] == list(range(1, len(first) + 1))
    assert service.engine.jobs.get(job.job_id).watchers == 0


async def test_a_watch_ends_ok_and_carries_the_failure_in_its_event(service):
    service.executor.gates[Lane.STEP].close()
    job = await service.create()
    watching = asyncio.create_task(service.watch(job.job_id))
    await until(lambda: service.engine.jobs.get(job.job_id).watchers == 1)
    await service.executor.die()
    events = await watching
    assert kinds(events)[-1] == "failed"
    assert events[-1].failed.status.code == 14


async def test_a_place_that_the_job_has_not_reached_is_out_of_range(service):
    job = await service.finished()
    request = job_pb2.WatchJobRequest(job_id=job.job_id, after_seq=job.last_seq + 1)
    error = await refusal(service.jobs.WatchJob(request))
    assert (error.code, error.reason) == ("OUT_OF_RANGE", "AFTER_SEQ_OUT_OF_RANGE")
    assert error.metadata == {"job_id": job.job_id, "last_seq": str(job.last_seq)}


async def test_bytes_come_with_a_watch_that_asks_for_them(service):
    job = await service.finished()
    assert "artifact_chunk" not in kinds(await service.watch(job.job_id))
    events = await service.watch(job.job_id, delivery="ARTIFACT_DELIVERY_INLINE_CHUNKS")
    chunk = events[kinds(events).index("artifact_chunk")].artifact_chunk
    assert chunk.data == await service.engine.artifacts.data(job.artifacts[0].artifact_id)
    request = job_pb2.WatchJobRequest(job_id=job.job_id, delivery="ARTIFACT_DELIVERY_SIGNED_URL")
    error = await refusal(service.jobs.WatchJob(request))
    assert (error.fields, "--artifact-url s3://" in error.message) == (["delivery"], True)


async def test_silence_is_filled_with_heartbeats_that_have_no_place():
    async with serving(heartbeat_interval=0.05) as service:
        service.executor.gates[Lane.STEP].close()
        job = await service.create(options={"client_job_id": "mine"})
        call = aiter(service.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=job.job_id, after_seq=3)))
        beats = [(await anext(call)).event for _ in range(2)]
        assert kinds(beats) == ["heartbeat", "heartbeat"]
        assert {(beat.job_id, beat.seq, beat.client_job_id) for beat in beats} == {(job.job_id, 0, "mine")}
        service.executor.gates[Lane.STEP].open()
        rest = [message.event async for message in call]
    assert [event.seq for event in rest if event.seq] == list(range(4, 10))


# --- pace -------------------------------------------------------------------------------------------------------------


def entries(count: int) -> list[Entry]:
    return [Entry(seq, 0.0, step(seq, 100)) for seq in range(1, count + 1)]


def step(number: int, total: int) -> StepProgress:
    return StepProgress(
        step=number, total_steps=total, sigma=1, timestep=1, step_time=0, elapsed=0, eta=0, rows_total=1
    )


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_progress_is_thinned_out_and_counted():
    clock = Clock()
    pace = Pace(1.0, clock)
    seen = []
    for entry in entries(8):
        if (update := pace.take(entry)) is not None:
            seen.append((update.entry.seq, update.coalesced))
        clock.now += 0.4
    assert seen == [(1, 0), (4, 2), (7, 2)]
    assert pace.due() == pytest.approx(0.2)
    clock.now += 0.2
    assert (pace.release().entry.seq, pace.due()) == (8, None)


def test_the_last_step_passes_however_soon_it_comes():
    pace = Pace(3600.0)
    sent = [pace.take(Entry(seq, 0.0, step(seq, 4))) for seq in range(1, 5)]
    assert [update and (update.entry.seq, update.after, update.coalesced) for update in sent] == [
        (1, 0, 0), None, None, (4, 1, 2),
    ]  # fmt: skip


def test_what_is_no_progress_passes_at_once_and_counts_what_it_overtook():
    clock = Clock()
    pace = Pace(1.0, clock)
    pace.take(Entry(1, 0.0, step(1, 3)))
    assert pace.take(Entry(2, 0.0, step(2, 3))) is None
    assert pace.take(Entry(3, 0.0, DecodeProgress(done_units=0, total_units=1))) is None
    update = pace.take(Entry(4, 0.0, EncodeDone(elapsed=0, prompt_tokens=1)))
    assert (update.entry.seq, update.coalesced, pace.due()) == (4, 2, None)


def test_without_an_interval_everything_passes():
    pace = Pace(0.0)
    assert [pace.take(entry).coalesced for entry in entries(50)] == [0] * 50


async def test_a_watcher_with_an_interval_is_told_how_much_it_was_spared(service):
    job = await service.finished(sampling={"steps": 50})
    events = await service.watch(job.job_id, min_progress_interval={"seconds": 3600})
    assert kinds(events) == [
        "queued", "started", "encode_done", "step_progress", "step_progress", "artifact_ready", "completed",
    ]  # fmt: skip
    assert [event.step_progress.step for event in events[3:5]] == [1, 50], "the last step is never left out"
    assert [event.coalesced for event in events] == [0, 0, 0, 0, 48, 1, 0]
    assert len(events) + sum(event.coalesced for event in events) == job.last_seq


async def test_a_held_step_comes_when_the_interval_is_over(service):
    service.executor.gates[Lane.STEP].close()
    call = service.generation.GenerateImage(image(options={"min_progress_interval": {"nanos": 100_000_000}}))
    for _ in range(3):
        await call.read()
    service.executor.gates[Lane.STEP].let(2)
    steps = [(await call.read()).event for _ in range(2)]
    assert [(event.step_progress.step, event.coalesced) for event in steps] == [(1, 0), (2, 0)]


async def test_a_slow_watcher_misses_steps_and_no_state_and_a_fast_one_beside_it_misses_nothing(service):
    gate = service.executor.gates[Lane.STEP]
    gate.close()
    preview = {"method": "PREVIEW_METHOD_LATENT_RGB", "max_edge_px": 256, "format": "IMAGE_FORMAT_JPEG"}
    job = await service.create(sampling={"steps": 60}, options={"preview": preview})
    # without its probes a client takes 64 KiB before it reads, which is about one preview
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0), *DIRECT)
    channel = aio.insecure_channel(f"127.0.0.1:{service.server.port}", options=options)
    slow = aiter(job_pb2_grpc.JobServiceStub(channel).WatchJob(job_pb2.WatchJobRequest(job_id=job.job_id)))
    late = [(await anext(slow)).event]
    fast = []
    request = job_pb2.WatchJobRequest(job_id=job.job_id, omit_previews=True)
    async for message in service.jobs.WatchJob(request):
        fast.append(message.event)
        if message.event.WhichOneof("event") in ("encode_done", "step_progress"):
            gate.let(1)
    late += [message.event async for message in slow]
    await channel.close()

    assert [event.step_progress.step for event in fast if event.HasField("step_progress")] == list(range(1, 61))
    assert [event.seq for event in fast] == list(range(1, len(fast) + 1))
    assert {event.coalesced for event in fast} == {0}

    def states(events):
        return [kind for kind in kinds(events) if kind != "step_progress"]

    assert states(late) == states(fast)
    gaps = [after.seq - before.seq - 1 for before, after in pairwise(late)]
    assert [event.coalesced for event in late[1:]] == gaps
    assert sum(gaps) > 30, "it was slow"
    assert [event.step_progress.step for event in late if event.HasField("step_progress")][-1] == 60


# --- many jobs --------------------------------------------------------------------------------------------------------


def watch_jobs(service, **query):
    return service.jobs.WatchJobs(job_pb2.WatchJobsRequest(**query))


def by_job(messages) -> dict[str, list[object]]:
    """Per job, what came: a snapshot's last_seq in brackets, an event's seq."""
    result: dict[str, list[object]] = {}
    for message in messages:
        if message.WhichOneof("update") == "snapshot":
            result.setdefault(message.snapshot.job_id, []).append([message.snapshot.last_seq])
        else:
            result.setdefault(message.event.job_id, []).append(message.event.seq)
    return result


async def test_many_jobs_come_on_one_stream_each_from_its_own_place(service):
    service.executor.gates[Lane.STEP].close()
    done_id, (fresh_id, resumed_id) = "", [(await service.create()).job_id for _ in range(2)]
    await until(lambda: all(service.engine.jobs.get(job).last_seq == 3 for job in (fresh_id, resumed_id)))
    service.executor.gates[Lane.STEP].open()
    done_id = (await service.finished()).job_id
    await service.watch(fresh_id)
    await service.watch(resumed_id)
    call = watch_jobs(service, job_ids=[fresh_id, resumed_id, done_id, fresh_id], after_seq={resumed_id: 4})
    seen = by_job([message async for message in call])
    assert seen == {fresh_id: [[9]], resumed_id: [5, 6, 7, 8, 9], done_id: [[9]]}


async def test_a_snapshot_and_the_events_after_it_leave_no_gap(service):
    service.executor.gates[Lane.STEP].close()
    ids = [(await service.create(sampling={"steps": 20})).job_id for _ in range(3)]
    call = aiter(watch_jobs(service, job_ids=ids))
    messages = [await anext(call) for _ in ids]
    service.executor.gates[Lane.STEP].open()
    messages += [message async for message in call]
    for job_id, seen in by_job(messages).items():
        (start,), *seqs = seen
        left_out = sum(message.event.coalesced for message in messages if message.event.job_id == job_id)
        assert seqs == sorted(seqs)
        assert len(seqs) + left_out == 26 - start


async def test_a_selector_follows_jobs_that_are_made_later(service):
    old = await service.finished(options={"labels": {"page": "1"}})
    call = watch_jobs(service, label_selector={"page": "1"})
    assert (await call.read()).snapshot.job_id == old.job_id
    await service.create(options={"labels": {"page": "2"}})
    new = await service.create(options={"labels": {"page": "1", "more": "x"}})
    messages = []
    while not messages or messages[-1].event.WhichOneof("event") != "completed":
        messages.append(await call.read())
    seen = by_job(messages)
    assert list(seen) == [new.job_id]
    (start,), *seqs = seen[new.job_id]
    assert seqs == list(range(start + 1, 10))


async def test_watching_many_jobs_counts_as_watching_each(service):
    service.executor.gates[Lane.STEP].close()
    jobs = [service.engine.jobs.get((await service.create()).job_id) for _ in range(2)]
    call = watch_jobs(service, job_ids=[job.id for job in jobs])
    await until(lambda: [job.watchers for job in jobs] == [1, 1])
    call.cancel()
    await until(lambda: [job.watchers for job in jobs] == [0, 0])


async def test_a_stream_of_many_jobs_beats_as_a_whole():
    async with serving(heartbeat_interval=0.05) as service:
        call = watch_jobs(service, label_selector={"page": "none"})
        event = (await call.read()).event
        assert (event.WhichOneof("event"), event.job_id, event.seq) == ("heartbeat", "", 0)


@pytest.mark.parametrize(
    ("query", "code", "reason"),
    [
        ({}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ({"job_ids": ["nothing"]}, "NOT_FOUND", "JOB_NOT_FOUND"),
        ({"job_ids": ["KNOWN"], "after_seq": {"KNOWN": 99}}, "OUT_OF_RANGE", "AFTER_SEQ_OUT_OF_RANGE"),
        ({"label_selector": {"page": "1"}, "after_seq": {"KNOWN": 1}}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        ({"job_ids": ["KNOWN"], "after_seq": {"nothing": 1}}, "NOT_FOUND", "JOB_NOT_FOUND"),
        ({"job_ids": ["KNOWN"], "min_progress_interval": {"seconds": -1}}, "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
    ],
)
async def test_a_watch_of_many_that_makes_no_sense_is_refused(service, query, code, reason):
    known = (await service.finished()).job_id
    query = dict(query)
    if "job_ids" in query:
        query["job_ids"] = [job_id.replace("KNOWN", known) for job_id in query["job_ids"]]
    if "after_seq" in query:
        query["after_seq"] = {job_id.replace("KNOWN", known): seq for job_id, seq in query["after_seq"].items()}
    error = await refusal(watch_jobs(service, **query))
    assert (error.code, error.reason) == (code, reason)


async def test_a_stream_that_has_no_end_of_its_own_ends_with_the_server():
    async with serving() as service:
        service.executor.gates[Lane.STEP].close()
        job = await service.create(options={"labels": {"page": "1"}})
        call = aiter(watch_jobs(service, label_selector={"page": "1"}))
        await anext(call)
        ending = asyncio.create_task(to_error(call))
        await until(lambda: service.engine.jobs.get(job.job_id).watchers == 1)
        await service.server.stop()
        messages, error = await ending
        assert (error.code, error.reason) == ("UNAVAILABLE", "SERVER_STOPPED")
        assert messages[-1].event.WhichOneof("event") == "failed", "the last event of the job came before"
        assert messages[-1].event.failed.status.code == 14


async def test_a_watch_of_labels_remembers_the_newest_jobs_alone(monkeypatch):
    monkeypatch.setattr(gate_jobs, "MOST_KNOWN", 3)
    async with serving(retention=0) as service:
        service.executor.gates[Lane.STEP].close()
        named = await service.create(options={"labels": {"page": "1"}})
        newcomers = Newcomers([service.engine.jobs.get(named.job_id)])
        seen = []
        for _ in range(5):
            made = [(await service.create(options={"labels": {"page": "1"}})).job_id for _ in range(2)]
            seen += [job.id for job in newcomers.among(service.engine.jobs.newest(labels={"page": "1"}))]
            assert seen[-2:] == made
            assert newcomers.among(service.engine.jobs.newest(labels={"page": "1"})) == []
            assert len(newcomers) == 3
            service.executor.gates[Lane.STEP].open()
            await until(lambda: len(service.engine.jobs) == 0)
            service.executor.gates[Lane.STEP].close()
        assert len(seen) == 10, "the job that was named is not new"
