"""Two servers on one database: each knows, follows, stops and deletes the jobs of the other, and takes them over."""

import asyncio
import time

import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.gate import sharing
from omni_grpc.store.records import Cause
from omni_grpc.types.media import ImageFormat
from omni_grpc.v1 import artifact_pb2, event_pb2, job_pb2
from tests.lasting.lives import FIRST, data, kept, stepping
from tests.server.fake_executor import picture
from tests.server.service import image, refusal, to_error, until

pytestmark = pytest.mark.service


@pytest.fixture
async def pair(shared):
    """Two servers that know of each other."""
    first = await shared.start(max_num_seqs=1)
    second = await shared.start(max_num_seqs=1)
    await until(lambda: first.gate._sharing._others and second.gate._sharing._others)
    return first, second


def held(life):
    life.executor.gates[Lane.STEP].close()
    return life


async def following(life, job_id):
    """A task that watches a job at a server, once it does."""
    task = asyncio.create_task(life.watch(job_id))
    await until(lambda: (job := life.engine.jobs.followed(job_id)) is not None and job.watchers > 0)
    return task


async def test_each_shows_the_jobs_of_the_other(pair):
    first, second = pair
    held(first), held(second)
    running, waiting = await first.create(), await first.create()
    other, last = await second.create(), await second.create()
    await stepping(first, running.job_id)
    await stepping(second, other.job_id)
    for life in pair:
        listed = (await life.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs
        assert [job.job_id for job in listed] == [job.job_id for job in (last, other, waiting, running)]
        assert [(await life.get(job.job_id)).state for job in (running, waiting)] == [
            event_pb2.JOB_STATE_RUNNING,
            event_pb2.JOB_STATE_QUEUED,
        ]
        assert [(await life.get(job.job_id)).queue_position for job in (waiting, last)] == [0, 1]


async def test_a_watch_at_the_other_misses_no_event_and_sees_progress(pair):
    first, second = pair
    held(first)
    job = await first.create(sampling={"steps": 6})
    watched = await following(second, job.job_id)
    for _ in range(5):
        first.executor.gates[Lane.STEP].let(1)
        await asyncio.sleep(0.15)
    first.executor.gates[Lane.STEP].open()
    events = await asyncio.wait_for(watched, 10)
    assert kept(events) == [*FIRST, "artifact_ready", "completed"]
    assert sum(event.WhichOneof("event") == "step_progress" for event in events) >= 2
    seqs = [event.seq for event in events if event.WhichOneof("event") != "heartbeat"]
    assert seqs == sorted(set(seqs))
    assert await data(second, events[-1].completed.artifacts[0].artifact_id) == picture(32, 16, 7, ImageFormat.PNG)


async def test_a_step_that_arrives_before_the_state_behind_which_it_was_does_not_hide_it(pair):
    first, second = pair
    held(first)
    job = await first.create(sampling={"steps": 6})
    await stepping(first, job.job_id)
    watched = await following(second, job.job_id)
    # a slow read: the step is heard before what the notice of the state had the server look for
    second.trouble.hold("jobs.read")
    first.engine.jobs.get(job.job_id).append(_preempted())
    await first.engine.storage.journal.settled(job.job_id)
    first.executor.gates[Lane.STEP].let(1)
    await asyncio.sleep(0.5)
    second.trouble.mend()
    first.executor.gates[Lane.STEP].open()
    assert kept(await asyncio.wait_for(watched, 10)) == [*FIRST, "preempted", "artifact_ready", "completed"]


def _preempted():
    from omni_grpc.types.events import Preempted

    return Preempted(completed_steps=0, reason="test", position=0)


async def test_a_job_is_cancelled_at_the_other(pair):
    first, second = pair
    held(first)
    running, waiting = await first.create(), await first.create()
    await stepping(first, running.job_id)
    for job in (running, waiting):
        began = time.monotonic()
        answer = await second.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=job.job_id, reason="enough"))
        assert answer.job.state == event_pb2.JOB_STATE_CANCELLED
        assert time.monotonic() - began < 3
        assert (await first.watch(job.job_id))[-1].cancelled.reason == "enough"
    again = await second.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=running.job_id, reason="again"))
    assert again.job.state == event_pb2.JOB_STATE_CANCELLED


@pytest.fixture
def without_looks(monkeypatch):
    """Servers that do not look at the rows of others: what they are not told they do not learn."""
    monkeypatch.setattr(sharing, "LOOK", 3600.0)


@pytest.mark.usefixtures("without_looks")
async def test_servers_tell_each_other_what_happens_and_what_is_to_happen(pair):
    first, second = pair
    held(first)
    job = await first.create()
    task = await following(second, job.job_id)
    await stepping(first, job.job_id)
    answer = await second.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=job.job_id, reason="enough"))
    assert answer.job.state == event_pb2.JOB_STATE_CANCELLED
    assert (await asyncio.wait_for(task, 10))[-1].cancelled.reason == "enough"


async def test_a_job_is_deleted_at_the_other(pair):
    first, second = pair
    job = await first.finished()
    await second.jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=job.job_id))
    await until(lambda: job.job_id not in first.engine.jobs)
    for life in pair:
        gone = await refusal(life.jobs.GetJob(job_pb2.GetJobRequest(job_id=job.job_id)))
        assert gone.metadata["cause"] == "DELETED"
        request = artifact_pb2.DownloadArtifactRequest(artifact_id=job.artifacts[0].artifact_id)
        assert (await refusal(life.artifacts.DownloadArtifact(request))).metadata["cause"] == "DELETED"
    assert [name async for name in first.engine.storage.blobs.names("", time.time() + 10)] == []


async def test_a_watch_ends_where_its_job_is_deleted_before_it_saw_the_end(pair):
    first, second = pair
    held(first)
    job = await first.create()
    watch = asyncio.create_task(to_error(second.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=job.job_id))))
    await until(lambda: (found := second.engine.jobs.followed(job.job_id)) is not None and found.watchers > 0)
    second.trouble.hold("jobs.read")
    first.executor.gates[Lane.STEP].open()
    await until(lambda: first.engine.jobs.get(job.job_id).state.terminal)
    await first.engine.storage.store.jobs.delete([job.job_id], Cause.DELETED)
    second.trouble.mend()
    _, error = await asyncio.wait_for(watch, 10)
    assert (error.code, error.reason, error.metadata["cause"]) == ("NOT_FOUND", "JOB_NOT_FOUND", "DELETED")


async def test_a_request_id_that_is_sent_to_both_makes_one_job(pair):
    asked = job_pb2.CreateJobRequest(generate_image=image(options={"request_id": "once"}))
    answers = await asyncio.gather(*(life.jobs.CreateJob(asked) for life in (*pair, *pair) for _ in range(3)))
    assert len({answer.job.job_id for answer in answers}) == 1
    assert sum(not answer.deduplicated for answer in answers) == 1
    (owner,) = [life for life in pair if answers[0].job.job_id in life.engine.jobs]
    assert (await owner.watch(answers[0].job.job_id))[-1].WhichOneof("event") == "completed"
    assert sum(len(plan.admit) for life in pair for plan in life.executor.plans) <= 2


async def test_one_takes_over_from_the_other_within_the_lease(pair):
    first, second = pair
    held(first)
    running = await first.create(options={"on_server_restart": "RESTART_POLICY_REQUEUE"})
    waiting = await first.create()
    await stepping(first, running.job_id)
    watched = await following(second, running.job_id)
    await first.abandon()
    began = time.monotonic()
    assert kept(await asyncio.wait_for(watched, 10)) == [*FIRST, "retrying", *FIRST, "artifact_ready", "completed"]
    assert kept(await second.watch(waiting.job_id)) == ["queued", *FIRST, "artifact_ready", "completed"]
    assert time.monotonic() - began < 5


async def test_a_server_that_was_thought_dead_drops_what_it_lost_and_writes_nothing_over_it(pair):
    first, second = pair
    held(first)
    running = await first.create(options={"on_server_restart": "RESTART_POLICY_REQUEUE"})
    waiting = await first.create()
    await stepping(first, running.job_id)
    first.blob_trouble.hold("put")
    beat = first.gate._sharing._beat
    first.pause()
    for job in (running, waiting):
        assert kept(await second.watch(job.job_id))[-1] == "completed"
    (artifact,) = (await second.get(running.job_id)).artifacts
    # it goes on, and is about to store its own output
    first.executor.gates[Lane.STEP].open()
    await until(lambda: running.job_id in first.engine._outputs or running.job_id not in first.engine.jobs)
    await beat()
    first.blob_trouble.mend()
    await until(lambda: running.job_id not in first.engine.jobs and waiting.job_id not in first.engine.jobs)
    await first.engine._outputs.close()
    assert kept(await second.watch(running.job_id)) == [*FIRST, "retrying", *FIRST, "artifact_ready", "completed"]
    assert await data(second, artifact.artifact_id) == picture(32, 16, 7, ImageFormat.PNG)
    assert (await first.get(running.job_id)).state == event_pb2.JOB_STATE_SUCCEEDED
    # and takes jobs as before
    assert (await first.watch((await first.create()).job_id))[-1].WhichOneof("event") == "completed"


async def test_a_job_that_is_watched_at_the_other_is_not_cancelled_for_want_of_watchers(pair):
    first, second = pair
    held(first)
    options = {"on_disconnect": "DISCONNECT_POLICY_CANCEL", "disconnect_grace": {"seconds": 2}}
    watched, unwatched = await first.create(options=options), await first.create(options=options)
    task = await following(second, watched.job_id)
    assert "no client watched" in (await _ended(first, unwatched.job_id)).cancelled.reason
    await asyncio.sleep(1)
    first.executor.gates[Lane.STEP].open()
    assert (await asyncio.wait_for(task, 10))[-1].WhichOneof("event") == "completed"


async def _ended(life, job_id):
    await until(lambda: life.engine.jobs.get(job_id).state.terminal)
    return (await life.watch(job_id))[-1]


async def test_what_one_deletes_does_not_count_at_the_other(pair, monkeypatch):
    first, second = pair
    job = await first.finished()
    await second.jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=job.job_id))
    assert first.engine.stats().artifact_bytes > 0
    # it looks before it throws anything away
    await first.engine.storage.retention._make_room()
    assert first.engine.stats().artifact_bytes == 0


async def test_a_server_that_drains_takes_over_nothing(pair):
    first, second = pair
    held(first), held(second)
    running = await second.create()
    await stepping(second, running.job_id)
    lost = await first.create()
    await stepping(first, lost.job_id)
    stopping = asyncio.create_task(second.stop(drain=30))
    await until(lambda: not second.engine.takes_over)
    await first.abandon()
    await asyncio.sleep(1.6)
    assert lost.job_id not in second.engine.jobs
    second.executor.gates[Lane.STEP].open()
    await stopping


async def test_results_are_written_before_others_may_take_the_jobs_of_a_server_that_stops(pair):
    first, second = pair
    held(first)
    running = await first.create()
    await stepping(first, running.job_id)
    first.trouble.hold("jobs.write")
    stopping = asyncio.create_task(first.stop(drain=30))
    first.executor.gates[Lane.STEP].open()
    await until(lambda: first.engine.state == "STOPPED")
    await asyncio.sleep(0.5)
    assert first.engine.storage.instance_id in await second.engine.storage.store.servers.alive(time.time())
    first.trouble.mend()
    await stopping
    assert kept(await second.watch(running.job_id)) == [*FIRST, "artifact_ready", "completed"]
