"""JobService without its streams: create, get, list, cancel, delete."""

import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import Code, Failure, NotFound
from omni_grpc.v1 import event_pb2, job_pb2, sampling_pb2

from .service import image, kinds, refusal, serving, until


async def create(service, **changes) -> job_pb2.CreateJobResponse:
    return await service.jobs.CreateJob(job_pb2.CreateJobRequest(generate_image=image(**changes)))


async def test_a_new_job_is_returned_at_once_with_its_warnings(service):
    service.executor.gates[Lane.PREPARE].close()
    options = {"labels": {"user": "ada"}, "request_id": "r1", "client_job_id": "c1"}
    response = await create(service, options=options, sampling={"guidance": {"scale": 2.0}})
    job = response.job
    assert not response.deduplicated
    assert [warning.code for warning in response.warnings] == ["GUIDANCE_WITHOUT_EFFECT"]
    assert list(response.warnings) == list(job.warnings)
    assert (job.model, job.task, job.total_steps) == ("toy", sampling_pb2.TASK_TEXT_TO_IMAGE, 3)
    assert (dict(job.labels), job.request_id, job.client_job_id) == ({"user": "ada"}, "r1", "c1")
    assert not job.HasField("end_time")
    assert not job.HasField("expire_time")


async def test_a_record_follows_the_job_to_its_end():
    async with serving(retention=100) as service:
        service.executor.gates[Lane.STEP].close()
        service.executor.gates[Lane.STEP].let(2)
        job = await service.create()
        await until(lambda: service.engine.jobs.get(job.job_id).step == 2)
        running = await service.get(job.job_id)
        assert (running.state, running.step, running.total_steps) == (event_pb2.JOB_STATE_RUNNING, 2, 3)
        assert running.HasField("start_time")
        assert running.HasField("eta")
        service.executor.gates[Lane.STEP].open()
        events = await service.watch(job.job_id)
        done = await service.get(job.job_id)
    assert (done.state, done.step, done.last_seq) == (event_pb2.JOB_STATE_SUCCEEDED, 3, events[-1].seq)
    assert not done.HasField("eta")
    assert not done.HasField("error")
    completed = events[-1].completed
    assert (list(done.artifacts), done.stats, done.effective) == (
        list(completed.artifacts), completed.stats, completed.effective,
    )  # fmt: skip
    assert done.expire_time.ToNanoseconds() - done.end_time.ToNanoseconds() == pytest.approx(100e9, rel=0.01)
    assert done.artifacts[0].expire_time == done.expire_time
    assert done.start_time.ToNanoseconds() <= done.artifacts[0].create_time.ToNanoseconds()


async def test_outputs_of_a_running_job_are_in_its_record_and_a_failure_is_too(service):
    service.executor.failures[Lane.STEP] = Failure(
        code=Code.UNAVAILABLE, reason="WORKER_DIED", message="gone", retry_after=1
    )
    job = await service.finished()
    assert job.state == event_pb2.JOB_STATE_FAILED
    assert (job.error.code, job.error.message, job.retryable) == (14, "gone", True)


async def test_a_queued_job_knows_its_place():
    async with serving(max_num_seqs=1) as service:
        service.executor.gates[Lane.STEP].close()
        jobs = [await service.create() for _ in range(3)]
        places = [(await service.get(job.job_id)).queue_position for job in jobs]
        assert places == [0, 0, 1]
        states = [(await service.get(job.job_id)).state for job in jobs]
        assert states == [event_pb2.JOB_STATE_RUNNING, event_pb2.JOB_STATE_QUEUED, event_pb2.JOB_STATE_QUEUED]


async def test_a_full_queue_is_refused_with_a_time_to_come_back():
    async with serving(max_num_seqs=1, max_queue=1) as service:
        service.executor.gates[Lane.STEP].close()
        await service.create()
        await service.create()
        for call in (create(service), service.generation.GenerateImage(image())):
            error = await refusal(call)
            assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
            assert error.details["RetryInfo"].retry_delay.seconds == 1
            assert error.details["QuotaFailure"].violations[0].subject == "QUEUE_FULL"


async def test_create_job_needs_a_task(service):
    error = await refusal(service.jobs.CreateJob(job_pb2.CreateJobRequest()))
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", ["task"])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"delivery": "ARTIFACT_DELIVERY_INLINE_CHUNKS"}, "options.delivery"),
        ({"min_progress_interval": {"seconds": 1}}, "options.min_progress_interval"),
        ({"disconnect_grace": {"seconds": 1}}, "options.disconnect_grace"),
        ({"disconnect_grace": {}, "on_disconnect": "DISCONNECT_POLICY_CANCEL"}, "options.disconnect_grace"),
    ],
)
async def test_create_job_refuses_options_that_shape_a_stream(service, options, field):
    assert (await refusal(create(service, options=options))).fields == [field]


async def test_a_created_job_that_is_tied_to_a_watcher_waits_for_one_only_as_long_as_the_grace(service):
    service.executor.gates[Lane.STEP].close()
    options = {"on_disconnect": "DISCONNECT_POLICY_CANCEL", "disconnect_grace": {"nanos": 20_000_000}}
    job = (await create(service, options=options)).job
    events = await service.watch(job.job_id) if service.engine.jobs.get(job.job_id).state.terminal else []
    await until(lambda: service.engine.jobs.get(job.job_id).state.terminal)
    events = await service.watch(job.job_id)
    assert kinds(events)[-1] == "cancelled"
    assert events[-1].cancelled.reason == "no client watched the job for 0.02 s"


# --- lists ------------------------------------------------------------------------------------------------------------


async def listed(service, **query) -> tuple[list[str], str]:
    response = await service.jobs.ListJobs(job_pb2.ListJobsRequest(**query))
    return [job.job_id for job in response.jobs], response.next_page_token


async def test_jobs_are_listed_newest_first_by_state_label_and_model(service):
    service.executor.gates[Lane.STEP].close()
    ada, bob = {"labels": {"user": "ada", "app": "web"}}, {"labels": {"user": "bob", "app": "web"}}
    first, second, third = [(await service.create(options=options)).job_id for options in (ada, bob, ada)]
    await service.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=first))
    assert (await listed(service))[0] == [third, second, first]
    assert (await listed(service, label_selector={"user": "ada"}))[0] == [third, first]
    assert (await listed(service, label_selector={"user": "ada", "app": "cli"}))[0] == []
    assert (await listed(service, states=["JOB_STATE_CANCELLED"]))[0] == [first]
    assert (await listed(service, states=["JOB_STATE_RUNNING", "JOB_STATE_CANCELLED"]))[0] == [third, second, first]
    assert (await listed(service, states=["JOB_STATE_PREEMPTED"]))[0] == [], "a state that is never entered is not all"
    assert (await listed(service, model="toy"))[0] == [third, second, first]
    assert (await listed(service, model="other"))[0] == []


async def test_pages_neither_repeat_nor_hide_a_job_while_jobs_come_and_go(service):
    made = [(await service.finished()).job_id for _ in range(5)]
    newest = list(reversed(made))
    page, token = await listed(service, page_size=2)
    assert page == newest[:2]
    await service.jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=newest[1]))
    await service.create()
    page, token = await listed(service, page_size=2, page_token=token)
    assert page == newest[2:4]
    page, token = await listed(service, page_size=2, page_token=token)
    assert (page, token) == (newest[4:], "")


async def test_a_page_holds_fifty_by_default(service):
    for _ in range(51):
        await service.create()
    page, token = await listed(service)
    assert len(page) == 50
    assert len((await listed(service, page_token=token))[0]) == 1


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ({"page_token": "nonsense"}, "BAD_PAGE_TOKEN"),
        ({"page_token": "bm9uc2Vuc2U="}, "BAD_PAGE_TOKEN"),
        ({"states": [0]}, "INVALID_ARGUMENT"),
        ({"states": [42]}, "INVALID_ARGUMENT"),
    ],
)
async def test_a_bad_query_is_refused(service, query, reason):
    error = await refusal(service.jobs.ListJobs(job_pb2.ListJobsRequest(**query)))
    assert (error.code, error.reason, error.fields) == ("INVALID_ARGUMENT", reason, [next(iter(query))])


async def test_a_token_is_bound_to_its_filters(service):
    for _ in range(2):
        await service.create()
    _, token = await listed(service, page_size=1)
    query = job_pb2.ListJobsRequest(page_size=1, page_token=token, model="toy")
    error = await refusal(service.jobs.ListJobs(query))
    assert error.reason == "BAD_PAGE_TOKEN"
    assert len((await listed(service, page_size=5, page_token=token))[0]) == 1, "the size may change"


# --- the end of jobs --------------------------------------------------------------------------------------------------


async def test_cancelling_is_idempotent_and_leaves_a_finished_job_as_it_is(service):
    service.executor.gates[Lane.STEP].close()
    job = await service.create()
    request = job_pb2.CancelJobRequest(job_id=job.job_id)
    first = (await service.jobs.CancelJob(request)).job
    assert (await service.jobs.CancelJob(request)).job == first
    assert (await service.watch(job.job_id))[-1].cancelled.reason == "cancelled by the client"
    service.executor.gates[Lane.STEP].open()
    done = await service.finished()
    again = (await service.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=done.job_id))).job
    assert (again, again.cancel_requested) == (done, False)


async def test_a_long_reason_is_refused(service):
    request = job_pb2.CancelJobRequest(job_id="any", reason="x" * 1025)
    assert (await refusal(service.jobs.CancelJob(request))).fields == ["reason"]


async def test_a_job_can_be_deleted_once_it_has_ended(service):
    service.executor.gates[Lane.STEP].close()
    job = await service.create()
    request = job_pb2.DeleteJobRequest(job_id=job.job_id)
    error = await refusal(service.jobs.DeleteJob(request))
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "JOB_NOT_FINISHED")
    service.executor.gates[Lane.STEP].open()
    await service.watch(job.job_id)
    artifact_id = (await service.get(job.job_id)).artifacts[0].artifact_id
    await service.jobs.DeleteJob(request)
    assert (await refusal(service.jobs.DeleteJob(request))).reason == "JOB_NOT_FOUND"
    with pytest.raises(NotFound):
        await service.engine.artifacts.find(artifact_id)
    assert [name async for name in service.engine.storage.blobs.names("", float("inf"))] == []
