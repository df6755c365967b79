"""What a server that was killed, or stopped, leaves to the next one on the same store."""

import asyncio
import base64
import dataclasses
import hashlib
import io
import time

import PIL.Image
import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.server import endpoint
from omni_grpc.types.errors import Code, Failure, Unavailable
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.plan import Died
from omni_grpc.v1 import artifact_pb2, event_pb2, job_pb2
from tests.lasting.lives import FIRST, data, edited, kept, reason, restarted, stepping
from tests.server.fake_executor import FakeExecutor, picture
from tests.server.service import CHECKPOINT, image, kinds, refusal, to_error, until
from tests.server.studio import StudioExecutor, png, studio
from tests.server.test_assets import upload

pytestmark = pytest.mark.service
SUCCEEDED, FAILED, CANCELLED = (
    event_pb2.JOB_STATE_SUCCEEDED,
    event_pb2.JOB_STATE_FAILED,
    event_pb2.JOB_STATE_CANCELLED,
)


async def test_a_finished_job_is_as_it_was(lasting):
    first = await lasting.start()
    options = {"request_id": "once", "labels": {"kind": "circle"}, "client_job_id": "mine"}
    before = await first.finished(options=options, sampling={"num_outputs": 2})
    events = await first.watch(before.job_id)
    second = await restarted(lasting, first)

    job = await second.get(before.job_id)
    assert job == before
    again = await second.watch(before.job_id)
    assert [event.seq for event in again] == [event.seq for event in events if kept([event])]
    assert kept(again) == kept(events) == [*FIRST, "artifact_ready", "artifact_ready", "completed"]
    # seqs that were not kept are told of as coalesced, so that a client sees no gap
    seqs = [0]
    for event in again:
        assert event.seq == seqs[-1] + 1 + event.coalesced
        seqs.append(event.seq)
    assert kinds(await second.watch(before.job_id, after_seq=events[4].seq)) == [
        "artifact_ready", "artifact_ready", "completed",
    ]  # fmt: skip
    assert await second.watch(before.job_id, after_seq=events[-1].seq) == []
    assert (await refusal(second.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=job.job_id, after_seq=99)))).reason == (
        "AFTER_SEQ_OUT_OF_RANGE"
    )


async def test_its_outputs_can_be_had(lasting):
    first = await lasting.start()
    job = await first.finished(sampling={"num_outputs": 2, "seed": 7})
    second = await restarted(lasting, first)
    for artifact, seed in zip(job.artifacts, (7, 8), strict=True):
        whole = picture(32, 16, seed, ImageFormat.PNG)
        assert await data(second, artifact.artifact_id) == whole
        assert hashlib.sha256(whole).digest() == artifact.sha256
        assert await data(second, artifact.artifact_id, offset=10) == whole[10:]
        assert await data(second, artifact.artifact_id, offset=len(whole)) == b""
    listed = (await second.artifacts.ListArtifacts(artifact_pb2.ListArtifactsRequest(job_id=job.job_id))).artifacts
    assert sorted(one.artifact_id for one in listed) == sorted(one.artifact_id for one in job.artifacts)
    assert second.engine.stats().artifact_bytes == sum(one.size_bytes for one in job.artifacts)


async def test_lists_go_on(alone):
    first = await alone.start()
    made = [await first.finished(options={"labels": {"n": str(n)}}) for n in range(4)]
    second = await restarted(alone, first)
    made.append(await second.finished(options={"labels": {"n": "4"}}))
    page = await second.jobs.ListJobs(job_pb2.ListJobsRequest(page_size=3))
    rest = await second.jobs.ListJobs(job_pb2.ListJobsRequest(page_size=3, page_token=page.next_page_token))
    assert [job.job_id for job in (*page.jobs, *rest.jobs)] == [job.job_id for job in reversed(made)]
    chosen = await second.jobs.ListJobs(job_pb2.ListJobsRequest(label_selector={"n": "2"}))
    assert [job.job_id for job in chosen.jobs] == [made[2].job_id]


async def test_a_request_id_makes_one_job_in_all_lives(lasting):
    first = await lasting.start()
    before = await first.finished(options={"request_id": "once"})
    second = await restarted(lasting, first)
    asked = job_pb2.CreateJobRequest(generate_image=image(options={"request_id": "once"}))
    again = await second.jobs.CreateJob(asked)
    assert (again.deduplicated, again.job.job_id) == (True, before.job_id)
    other = job_pb2.CreateJobRequest(generate_image=image(prompt="a square", options={"request_id": "once"}))
    assert (await refusal(second.jobs.CreateJob(other))).reason == "REQUEST_ID_REUSED"


async def test_expired_deleted_and_unknown_are_told_apart(alone):
    first = await alone.start()
    deleted, expired, later = [
        await first.finished(options={"retention": {"seconds": seconds}}) for seconds in (600, 1, 3)
    ]
    await first.jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=deleted.job_id))
    await until(lambda: expired.job_id not in first.engine.jobs)
    second = await restarted(alone, first)
    assert (await second.get(later.job_id)).job_id == later.job_id
    await until(lambda: time.time() > later.expire_time.seconds + later.expire_time.nanos / 1e9)
    for name, cause in ((deleted, "DELETED"), (expired, "EXPIRED"), (later, "EXPIRED")):
        found = await refusal(second.jobs.GetJob(job_pb2.GetJobRequest(job_id=name.job_id)))
        assert (found.code, found.reason, found.metadata["cause"]) == ("NOT_FOUND", "JOB_NOT_FOUND", cause)
    unknown = await refusal(second.jobs.GetJob(job_pb2.GetJobRequest(job_id="job_unknown")))
    assert unknown.metadata["cause"] == "UNKNOWN"
    for one, cause in ((deleted, "DELETED"), (expired, "EXPIRED")):
        request = artifact_pb2.DownloadArtifactRequest(artifact_id=one.artifacts[0].artifact_id)
        assert (await refusal(second.artifacts.DownloadArtifact(request))).metadata["cause"] == cause
    third = await restarted(alone, second)
    assert (await refusal(third.jobs.GetJob(job_pb2.GetJobRequest(job_id=later.job_id)))).metadata["cause"] == "EXPIRED"


async def test_deleting_removes_rows_and_files(lasting):
    first = await lasting.start()
    job = await first.finished()
    second = await restarted(lasting, first)
    await second.jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=job.job_id))
    storage = second.engine.storage
    assert [name async for name in storage.blobs.names("", time.time() + 10)] == []
    assert await storage.store.jobs.read([job.job_id]) == []
    assert second.engine.stats().artifact_bytes == 0


async def test_jobs_that_waited_go_on_in_their_order(lasting):
    first = await lasting.start(max_num_seqs=1)
    first.executor.gates[Lane.STEP].close()
    running = await first.create()
    await stepping(first, running.job_id)
    waiting = [await first.create(sampling={"seed": seed}) for seed in range(4)]
    second = await restarted(lasting, first, max_num_seqs=1)
    events = [await second.watch(job.job_id) for job in waiting]
    for seed, log in enumerate(events):
        # it had been queued before, and is so again
        assert kept(log) == ["queued", *FIRST, "artifact_ready", "completed"]
        assert list(log[-1].completed.effective.seeds) == [seed]
        assert [event.seq for event in log] == sorted({event.seq for event in log})
    admitted = [request.id for plan in second.executor.plans for request in plan.admit]
    assert admitted == [job.job_id for job in waiting]


async def test_a_job_that_ran_fails_as_retryable_and_its_watchers_learn_of_it(lasting):
    first = await lasting.start()
    first.executor.gates[Lane.STEP].close()
    running = await first.create(sampling={"steps": 5})
    await stepping(first, running.job_id)
    first.executor.gates[Lane.STEP].let(3)
    await until(lambda: first.engine.jobs.get(running.job_id).step == 3)
    seen = first.engine.jobs.get(running.job_id).last_seq
    second = await restarted(lasting, first)
    # a client goes on behind what it has seen, which no store has
    (last,) = await second.watch(running.job_id, after_seq=seen)
    assert reason(last) == "SERVER_RESTARTED"
    assert (last.failed.status.code, last.failed.retryable) == (14, True)
    assert last.seq > seen
    job = await second.get(running.job_id)
    assert (job.state, job.retryable, reason(job)) == (FAILED, True, "SERVER_RESTARTED")
    assert kept(await second.watch(running.job_id)) == [*FIRST, "failed"]


async def test_a_job_that_asked_for_it_starts_over_once(lasting):
    first = await lasting.start()
    first.executor.gates[Lane.STEP].close()
    running = await first.create(sampling={"num_outputs": 2}, options={"on_server_restart": "RESTART_POLICY_REQUEUE"})
    await stepping(first, running.job_id)
    first.executor.gates[Lane.STEP].let(2)
    await until(lambda: first.engine.jobs.get(running.job_id).step == 2)
    seen = first.engine.jobs.get(running.job_id).last_seq
    second = await restarted(lasting, first)
    rest = await second.watch(running.job_id, after_seq=seen)
    assert kept(rest) == ["retrying", *FIRST, "artifact_ready", "artifact_ready", "completed"]
    assert reason(rest[0]) == "SERVER_RESTARTED"
    assert rest[0].seq > seen
    assert list(rest[-1].completed.effective.seeds) == [7, 8]
    whole = await second.watch(running.job_id)
    assert kept(whole) == [*FIRST, *kept(rest)]
    assert rest[-1].completed.stats.attempts == 2
    assert await data(second, rest[-1].completed.artifacts[0].artifact_id) == picture(32, 16, 7, ImageFormat.PNG)


async def test_the_log_of_the_first_attempt_can_be_read_before_the_second_begins(alone):
    first = await alone.start()
    first.executor.gates[Lane.STEP].close()
    running = await first.create(options={"on_server_restart": "RESTART_POLICY_REQUEUE"})
    await stepping(first, running.job_id)
    await first.abandon()
    second = await alone.start(max_num_seqs=1, before=lambda life: life.executor.gates[Lane.PREPARE].close())
    await until(lambda: second.engine.jobs.get(running.job_id).last_seq > 3)
    # as it is while it waits in the queue again
    job = second.engine.jobs.get(running.job_id)
    job.record = dataclasses.replace(job.record, start_time=None)
    call = second.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=running.job_id))
    events = [(await call.read()).event for _ in range(5)]
    assert kinds(events) == [*FIRST, "retrying", "queued"]
    assert 0 <= events[2].encode_done.elapsed.ToTimedelta().total_seconds() < 5
    call.cancel()


async def test_and_fails_when_its_next_server_is_lost_too(alone):
    first = await alone.start()
    first.executor.gates[Lane.STEP].close()
    running = await first.create(options={"on_server_restart": "RESTART_POLICY_REQUEUE"})
    await stepping(first, running.job_id)
    await first.abandon()
    second = await alone.start(before=lambda life: life.executor.gates[Lane.STEP].close())
    await stepping(second, running.job_id)
    third = await restarted(alone, second)
    assert kept(await third.watch(running.job_id)) == [*FIRST, "retrying", *FIRST, "failed"]
    assert reason(await third.get(running.job_id)) == "SERVER_RESTARTED"


async def test_a_cancel_that_was_asked_for_is_carried_out(lasting):
    first = await lasting.start(max_num_seqs=1)
    first.executor.gates[Lane.STEP].close()
    running, waiting = await first.create(), await first.create()
    await stepping(first, running.job_id)
    for job in (running, waiting):
        await first.engine.storage.store.jobs.request_cancel(job.job_id, "enough")
    second = await restarted(lasting, first)
    for job in (running, waiting):
        last = (await second.watch(job.job_id))[-1]
        assert last.cancelled.reason == "enough"
        assert (await second.get(job.job_id)).state == CANCELLED
    assert not [plan for plan in second.executor.plans if plan.admit]


async def test_a_deadline_holds_in_all_lives(alone):
    first = await alone.start()
    first.executor.gates[Lane.PREPARE].close()
    await first.create()
    deadline = time.time() + 1
    late = await first.create(options={"deadline": {"seconds": int(deadline), "nanos": int(deadline % 1 * 1e9)}})
    await first.abandon()
    await until(lambda: time.time() > deadline)
    second = await alone.start()
    last = (await second.watch(late.job_id))[-1]
    assert (reason(last), last.failed.status.code) == ("DEADLINE", 4)


async def test_a_job_that_is_tied_to_its_watchers_gets_its_grace_anew(alone):
    first = await alone.start()
    first.executor.gates[Lane.PREPARE].close()
    options = {"on_disconnect": "DISCONNECT_POLICY_CANCEL", "disconnect_grace": {"seconds": 1}}
    await first.create()
    watched, unwatched = await first.create(options=options), await first.create(options=options)
    await first.abandon()
    second = await alone.start(disconnect_grace=1, before=lambda life: life.executor.gates[Lane.PREPARE].close())
    await until(lambda: unwatched.job_id in second.engine.jobs)
    began = time.monotonic()
    call = second.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=watched.job_id))
    await call.read()
    await until(lambda: second.engine.jobs.get(unwatched.job_id).state.terminal)
    assert 0.8 < time.monotonic() - began < 5
    assert "no client watched" in (await second.watch(unwatched.job_id))[-1].cancelled.reason
    assert not second.engine.jobs.get(watched.job_id).state.terminal
    call.cancel()


async def test_jobs_of_a_model_that_is_not_served_any_more_say_so(alone):
    first = await alone.start()
    first.executor.gates[Lane.PREPARE].close()
    await first.create()
    waiting = await first.create()
    await first.abandon()
    second = await alone.start(checkpoint=dataclasses.replace(CHECKPOINT, name="other"), model="other")
    failure = (await second.watch(waiting.job_id))[-1].failed.status
    assert failure.code == 9
    assert "'toy'" in failure.message
    assert "'other'" in failure.message


async def test_uploads_survive(alone):
    first = await alone.start(checkpoint=studio(), executor=StudioExecutor())
    kept_one, deleted = await upload(first, png(), "image/png"), await upload(first, png(seed=2), "image/png")
    await first.artifacts.DeleteArtifact(artifact_pb2.DeleteArtifactRequest(artifact_id=deleted.asset_id))
    second = await restarted(alone, first, checkpoint=studio(), executor=StudioExecutor())
    job = await edited(second, {"asset_id": kept_one.asset_id})
    assert (await second.watch(job.job_id))[-1].WhichOneof("event") == "completed"
    gone = await refusal(edited(second, {"asset_id": deleted.asset_id}))
    assert (gone.reason, gone.metadata["cause"]) == ("ASSET_NOT_FOUND", "DELETED")
    assert second.engine.storage.assets.size_bytes == len(png())


def pixels_of(encoded):
    return PIL.Image.open(io.BytesIO(encoded)).convert("RGB").tobytes()


async def test_inputs_wait_with_their_jobs(alone):
    first = await alone.start(checkpoint=studio(), executor=StudioExecutor())
    output = (await first.finished(sampling={"seed": 3})).artifacts[0].artifact_id
    asset = await upload(first, png(seed=4), "image/png")
    first.executor.gates[Lane.PREPARE].close()
    await first.create()
    uri = "data:image/png;base64," + base64.b64encode(png(seed=5)).decode()
    jobs = [
        await edited(first, {"data": png(seed=6)}),
        await edited(first, {"uri": uri}),
        await edited(first, {"asset_id": asset.asset_id}),
        await edited(first, {"asset_id": output}, {"data": png(seed=6)}),
    ]
    await first.artifacts.DeleteArtifact(artifact_pb2.DeleteArtifactRequest(artifact_id=asset.asset_id))
    await first.artifacts.DeleteArtifact(artifact_pb2.DeleteArtifactRequest(artifact_id=output))
    second = await restarted(alone, first, checkpoint=studio(), executor=StudioExecutor())
    for job in jobs:
        assert (await second.watch(job.job_id))[-1].WhichOneof("event") == "completed", job
    asked = {request.id: request for plan in second.executor.plans for request in plan.admit}
    found = [[one.data for one in asked[job.job_id].inputs.images] for job in jobs]
    assert found == [
        [pixels_of(png(seed=6))],
        [pixels_of(png(seed=5))],
        [pixels_of(png(seed=4))],
        [pixels_of(picture(32, 16, 3, ImageFormat.PNG)), pixels_of(png(seed=6))],
    ]
    storage = second.engine.storage
    for job in jobs:
        await second.jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=job.job_id))
    assert [name async for name in storage.blobs.names("input-", time.time() + 10)] == []


async def test_a_stop_leaves_what_waits_and_lets_running_jobs_end(lasting):
    first = await lasting.start(max_num_seqs=1)
    first.executor.gates[Lane.STEP].close()
    running, waiting = await first.create(), await first.create()
    await stepping(first, running.job_id)
    watch = first.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=waiting.job_id))
    watched = asyncio.create_task(to_error(watch))
    watched_running = asyncio.create_task(first.watch(running.job_id))
    await until(lambda: first.engine.jobs.get(waiting.job_id).watchers == 1)
    stopping = asyncio.create_task(first.stop(drain=30))
    events, error = await watched
    assert kinds([message.event for message in events]) == ["queued"]
    assert (error.code, error.reason, error.metadata["job_id"]) == ("UNAVAILABLE", "SERVER_STOPPED", waiting.job_id)
    assert error.details["RetryInfo"]
    first.executor.gates[Lane.STEP].open()
    assert (await watched_running)[-1].WhichOneof("event") == "completed"
    await stopping
    second = await lasting.start()
    assert (await second.get(running.job_id)).state == SUCCEEDED
    assert kept(await second.watch(waiting.job_id)) == ["queued", *FIRST, "artifact_ready", "completed"]


async def test_a_job_that_outlasts_the_drain_fails_and_its_watchers_learn_of_it(lasting):
    first = await lasting.start()
    first.executor.gates[Lane.STEP].close()
    running = await first.create()
    again = await first.create(options={"on_server_restart": "RESTART_POLICY_REQUEUE"})
    await stepping(first, running.job_id)
    await until(lambda: first.engine.jobs.get(again.job_id).last_seq == 3)
    watched = asyncio.create_task(first.watch(running.job_id))
    await until(lambda: first.engine.jobs.get(running.job_id).watchers == 1)
    await first.stop(drain=0.1)
    assert reason((await watched)[-1]) == "SERVER_STOPPED"
    second = await lasting.start()
    job = await second.get(running.job_id)
    assert (reason(job), job.retryable) == ("SERVER_STOPPED", True)
    assert kept(await second.watch(again.job_id))[-1] == "completed"


async def test_watchers_see_the_end_however_long_its_commit_takes(lasting, monkeypatch):
    monkeypatch.setattr(endpoint, "LAST_WORDS_SECONDS", 0.2)
    first = await lasting.start()
    first.executor.gates[Lane.STEP].close()
    running = await first.create()
    await stepping(first, running.job_id)
    watched = [asyncio.create_task(first.watch(running.job_id)) for _ in range(20)]
    await until(lambda: first.engine.jobs.get(running.job_id).watchers == 20)
    first.trouble.hold("jobs.write")
    stopping = asyncio.create_task(first.server.stop())
    await asyncio.sleep(0.8)
    first.trouble.mend()
    await stopping
    for events in await asyncio.gather(*watched):
        assert reason(events[-1]) == "SERVER_STOPPED"


async def test_a_cancel_during_a_drain_reaches_the_next_server(lasting):
    first = await lasting.start(max_num_seqs=1)
    first.executor.gates[Lane.STEP].close()
    running, waiting = await first.create(), await first.create()
    await stepping(first, running.job_id)
    stopping = asyncio.create_task(first.stop(drain=30))
    await until(lambda: first.engine.jobs.get(waiting.job_id).released)
    answer = await first.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=waiting.job_id, reason="enough"))
    assert answer.job.cancel_requested
    first.executor.gates[Lane.STEP].open()
    await stopping
    second = await lasting.start()
    assert (await second.watch(waiting.job_id))[-1].cancelled.reason == "enough"


class Unloadable(FakeExecutor):
    async def _load(self):
        self._deliver(Died(failure=Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message="out of memory")))


async def test_a_model_that_does_not_load_takes_no_job_with_it(alone):
    first = await alone.start()
    first.executor.gates[Lane.PREPARE].close()
    await first.create()
    waiting = await first.create()
    await first.abandon()

    with pytest.raises(Unavailable, match="out of memory"):
        await alone.start(executor=Unloadable())
    third = await alone.start()
    assert kept(await third.watch(waiting.job_id))[-1] == "completed"
