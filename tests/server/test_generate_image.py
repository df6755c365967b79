"""GenerateImage from end to end: what comes on the stream, and how it ends."""

import asyncio
import hashlib
import io
import logging

import grpc
import PIL.Image
import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.media import ImageFormat
from omni_grpc.v1 import event_pb2, generation_pb2, job_pb2, media_pb2, sampling_pb2

from .fake_executor import picture
from .service import Service, image, kinds, refusal, serving, to_error, until


async def run(service: Service, request: generation_pb2.GenerateImageRequest):
    """Every event of a call that ends OK."""
    return [message.event async for message in service.generation.GenerateImage(request)]


async def run_to_error(service: Service, request: generation_pb2.GenerateImageRequest):
    """Every event of a call that ends in an error, and the error."""
    messages, error = await to_error(service.generation.GenerateImage(request))
    return [message.event for message in messages], error


async def test_a_generation_streams_every_event_in_order_and_then_the_bytes(service):
    events = await run(service, image(options={"client_job_id": "mine"}))
    assert kinds(events) == [
        "queued", "started", "encode_done", "step_progress", "step_progress", "step_progress", "decode_progress",
        "artifact_ready", "artifact_chunk", "completed",
    ]  # fmt: skip
    assert [event.seq for event in events] == [1, 2, 3, 4, 5, 6, 7, 8, 0, 9], "a chunk is not part of the log"
    assert {(event.job_id, event.client_job_id) for event in events} == {(events[0].job_id, "mine")}
    times = [event.time.ToNanoseconds() for event in events]
    assert times == sorted(times)

    started, steps = events[1].started, [event.step_progress for event in events[3:6]]
    assert (started.model, list(started.seeds), started.total_steps) == ("toy", [7], 3)
    assert (started.width, started.height, started.attempt) == (32, 16, 1)
    assert [(step.step, step.total_steps, step.rows_total) for step in steps] == [(1, 3, 1), (2, 3, 1), (3, 3, 1)]
    assert steps[0].sigma == 1
    assert steps[0].timestep == 1000
    assert steps[-1].eta.ToNanoseconds() == 0
    since_start = [event.time.ToNanoseconds() - events[1].time.ToNanoseconds() for event in events[2:6]]
    elapsed = [events[2].encode_done.elapsed, *(step.elapsed for step in steps)]
    assert [value.ToNanoseconds() for value in elapsed] == pytest.approx(since_start, abs=1000)

    artifact, chunk, completed = events[7].artifact_ready.artifact, events[8].artifact_chunk, events[9].completed
    assert chunk.data == picture(32, 16, 7, ImageFormat.PNG)
    assert (chunk.artifact_id, chunk.offset, chunk.last) == (artifact.artifact_id, 0, True)
    assert (artifact.size_bytes, artifact.sha256) == (len(chunk.data), hashlib.sha256(chunk.data).digest())
    assert (artifact.mime_type, artifact.width, artifact.height, artifact.seed) == ("image/png", 32, 16, 7)
    assert PIL.Image.open(io.BytesIO(chunk.data)).size == (32, 16)
    assert [made.artifact_id for made in completed.artifacts] == [artifact.artifact_id]
    assert completed.stats.steps_run == 3
    assert completed.stats.peak_memory_bytes == 4321


async def test_the_effective_parameters_name_every_default(service):
    request = generation_pb2.GenerateImageRequest(model="toy", prompt="a red circle", negative_prompt="")
    completed = (await run(service, request))[-1].completed
    effective = completed.effective
    assert (effective.width, effective.height, effective.steps) == (64, 32, 4)
    assert effective.guidance.true_cfg_scale == 4
    assert effective.guidance.norm == sampling_pb2.GUIDANCE_NORM_RENORM
    assert not effective.guidance.HasField("scale"), "the model has no embedded guidance"
    assert effective.scheduler == "ToyScheduler"
    assert effective.cache.WhichOneof("kind") == "off"
    assert effective.image_format == media_pb2.IMAGE_FORMAT_PNG
    assert effective.task == sampling_pb2.TASK_TEXT_TO_IMAGE
    assert effective.defaults_used["width"] == "64"


@pytest.mark.parametrize(
    ("changes", "rows", "scale"),
    [
        ({}, 1, 1.0),
        ({"negative_prompt": ""}, 2, 4.0),
        ({"negative_prompt": "blurry"}, 2, 4.0),
        ({"negative_prompt": "", "sampling": {"guidance": {"true_cfg_scale": 1.0}}}, 1, 1.0),
    ],
    ids=["unset", "empty", "given", "scale of one"],
)
async def test_an_unset_negative_prompt_is_not_an_empty_one(service, changes, rows, scale):
    events = await run(service, image(**changes))
    assert events[3].step_progress.rows_total == rows
    assert events[-1].completed.effective.guidance.true_cfg_scale == scale


async def test_seed_zero_is_a_seed(service):
    events = await run(service, image(sampling={"seed": 0}))
    assert list(events[1].started.seeds) == [0]
    assert events[8].artifact_chunk.data == picture(32, 16, 0, ImageFormat.PNG)
    assert "seeds" not in events[-1].completed.effective.defaults_used


async def test_one_seed_counts_up_over_the_outputs_and_a_list_is_taken_as_it_is(service):
    counted = await run(service, image(sampling={"num_outputs": 2}))
    assert [artifact.seed for artifact in counted[-1].completed.artifacts] == [7, 8]
    request = image()
    request.sampling.ClearField("seed")
    request.sampling.seeds.extend([5, 3])
    listed = await run(service, request)
    assert [(made.index, made.seed) for made in listed[-1].completed.artifacts] == [(0, 5), (1, 3)]


@pytest.mark.parametrize(
    ("format", "mime_type"),
    [("JPEG", "image/jpeg"), ("WEBP", "image/webp"), ("RAW_RGB8", "application/octet-stream")],
)
async def test_the_format_asked_for_is_the_format_made(service, format, mime_type):
    events = await run(service, image(output_format=f"IMAGE_FORMAT_{format}"))
    assert events[7].artifact_ready.artifact.mime_type == mime_type
    assert events[8].artifact_chunk.data == picture(32, 16, 7, ImageFormat(format))


async def test_a_large_artifact_comes_in_chunks_that_a_default_client_can_take(service):
    request = image(width=2048, height=1024, output_format="IMAGE_FORMAT_RAW_RGB8")
    events = await run(service, request)
    chunks = [event.artifact_chunk for event in events if event.WhichOneof("event") == "artifact_chunk"]
    data = b"".join(chunk.data for chunk in chunks)
    assert len(data) == 2048 * 1024 * 3 > 4 << 20, "more than a default client takes in one message"
    assert max(len(chunk.data) for chunk in chunks) <= 1 << 20
    assert [chunk.offset for chunk in chunks] == [sum(len(c.data) for c in chunks[:i]) for i in range(len(chunks))]
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert hashlib.sha256(data).digest() == events[-1].completed.artifacts[0].sha256


async def test_delivery_by_reference_sends_no_bytes(service):
    events = await run(service, image(options={"delivery": "ARTIFACT_DELIVERY_REFERENCE"}))
    assert "artifact_ready" in kinds(events)
    assert "artifact_chunk" not in kinds(events)


async def test_warnings_come_with_the_start_and_the_end(service):
    events = await run(service, image(sampling={"guidance": {"scale": 3.5}}))
    for warnings in (events[1].started.warnings, events[-1].completed.warnings):
        assert [(w.code, w.field, w.requested) for w in warnings] == [
            ("GUIDANCE_WITHOUT_EFFECT", "sampling.guidance.scale", "3.5")
        ]


# --- the failure rule -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", list(Lane))
async def test_a_failed_job_sends_its_event_and_then_ends_the_call_with_the_same_status(service, lane):
    service.executor.failures[lane] = Failure(
        code=Code.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", message="out of memory", retry_after=2.5
    )
    events, error = await run_to_error(service, image())
    failed = events[-1].failed
    assert (error.code, error.reason, error.message) == ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "out of memory")
    assert (failed.status.code, failed.status.message) == (8, "out of memory")
    assert [detail.type_url.rpartition(".")[2] for detail in failed.status.details] == list(error.details)
    assert error.details["RetryInfo"].retry_delay.ToMilliseconds() == 2500
    assert failed.retryable
    assert kinds(await run(service, image()))[-1] == "completed", "the next job is not touched by it"


# --- cancelling -------------------------------------------------------------------------------------------------------


async def cancelled_at(service: Service, arm: str):
    """Starts a generation, cancels its job from another call at the first event of this kind; returns how it ended."""

    async def cancelling(call):
        async for message in call:
            yield message
            if message.event.WhichOneof("event") == arm:
                request = job_pb2.CancelJobRequest(job_id=message.event.job_id, reason="enough")
                assert (await service.jobs.CancelJob(request)).job.cancel_requested

    messages, error = await to_error(cancelling(service.generation.GenerateImage(image())))
    return [message.event for message in messages], error


@pytest.mark.parametrize(
    ("lane", "admitted", "arm", "steps"),
    [
        (Lane.PREPARE, 0, "started", 0),
        (Lane.STEP, 0, "encode_done", 0),
        (Lane.STEP, 1, "step_progress", 1),
        (Lane.DECODE, 0, "decode_progress", 3),
    ],
    ids=["in prepare", "before the first step", "between steps", "in decode"],
)
async def test_a_job_can_be_cancelled_in_every_phase(service, lane, admitted, arm, steps):
    service.executor.gates[lane].close()
    service.executor.gates[lane].let(admitted)
    events, error = await cancelled_at(service, arm)
    assert (error.code, error.reason) == ("CANCELLED", "JOB_CANCELLED")
    assert "enough" in error.message
    assert (events[-1].cancelled.reason, events[-1].cancelled.completed_steps) == ("enough", steps)
    assert (await service.get(events[0].job_id)).state == event_pb2.JOB_STATE_CANCELLED
    service.executor.gates[lane].open()
    assert kinds(await run(service, image()))[-1] == "completed", "the lane is free again"


async def test_a_job_can_be_cancelled_in_the_queue():
    async with serving(max_num_seqs=1) as service:
        service.executor.gates[Lane.STEP].close()
        first = await service.create()
        events, error = await cancelled_at(service, "queued")
        assert kinds(events) == ["queued", "cancelled"]
        assert error.code == "CANCELLED"
        service.executor.gates[Lane.STEP].open()
        assert kinds(await service.watch(first.job_id))[-1] == "completed"


# --- clients that go --------------------------------------------------------------------------------------------------


async def left_after_first_step(service: Service, **options) -> str:
    """A client that starts a generation and drops the call at its first step; returns the job's id."""
    service.executor.gates[Lane.STEP].close()
    service.executor.gates[Lane.STEP].let(1)
    call = service.generation.GenerateImage(image(options=options))
    async for message in call:
        if message.event.WhichOneof("event") == "step_progress":
            break
    call.cancel()
    await until(lambda: not service.engine.jobs.get(message.event.job_id).watchers)
    return message.event.job_id


def grace_runs(service: Service, job_id: str) -> bool:
    return "disconnect_grace" in service.engine._timers._handles.get(job_id, {})


async def test_a_client_that_is_gone_for_the_grace_loses_its_job(service):
    job_id = await left_after_first_step(service, disconnect_grace={"nanos": 50_000_000})
    job = service.engine.jobs.get(job_id)
    assert not job.state.terminal, "the grace has begun, not ended"
    await asyncio.wait_for(job.wait(job.last_seq), 30)
    assert job.entries[-1].event.reason == "no client watched the job for 0.05 s"
    assert (await service.get(job_id)).cancel_requested


async def test_a_client_that_comes_back_in_time_saves_its_job(service):
    job_id = await left_after_first_step(service, disconnect_grace={"seconds": 30})
    assert grace_runs(service, job_id)
    before = (await service.get(job_id)).last_seq
    watching = asyncio.create_task(service.watch(job_id, after_seq=before))
    await until(lambda: not grace_runs(service, job_id))
    service.executor.gates[Lane.STEP].open()
    events = await watching
    assert kinds(events)[-1] == "completed"
    assert [event.seq for event in events] == list(range(before + 1, before + 1 + len(events)))


async def test_a_job_that_is_kept_outlives_its_client(service):
    job_id = await left_after_first_step(service, on_disconnect="DISCONNECT_POLICY_KEEP")
    assert not grace_runs(service, job_id)
    service.executor.gates[Lane.STEP].open()
    assert kinds(await service.watch(job_id))[-1] == "completed"


async def test_the_deadline_of_a_call_is_not_that_of_its_job(service):
    service.executor.gates[Lane.STEP].close()
    await service.channel.channel_ready()
    call = service.generation.GenerateImage(image(), timeout=1)
    job_id = (await call.read()).event.job_id
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not service.engine.jobs.get(job_id).state.terminal
    service.executor.gates[Lane.STEP].open()
    assert kinds(await service.watch(job_id))[-1] == "completed"


async def test_a_client_that_leaves_in_the_middle_of_the_bytes_stops_watching(service, caplog):
    """The server then stands in a write that the client's window blocks, not in a wait for events."""
    request = image(width=2048, height=2048, output_format="IMAGE_FORMAT_RAW_RGB8", sampling={"num_outputs": 3})
    call = service.generation.GenerateImage(request)
    async for message in call:
        if message.event.WhichOneof("event") == "artifact_chunk":
            break
    job = service.engine.jobs.get(message.event.job_id)
    await asyncio.sleep(0.1)
    assert job.watchers == 1
    call.cancel()
    await until(lambda: not job.watchers)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == [], "a client that goes is no error of ours"


# --- idempotency ------------------------------------------------------------------------------------------------------


async def test_the_same_request_id_is_the_same_job_and_the_same_bytes(service):
    request = image(options={"request_id": "once"})
    first, second = await run(service, request), await run(service, request)
    assert first == second, "a replay of the finished job, to the byte"
    created = await service.jobs.CreateJob(job_pb2.CreateJobRequest(generate_image=request))
    assert (created.deduplicated, created.job.job_id) == (True, first[0].job_id)
    assert sum(len(plan.admit) for plan in service.executor.plans) == 1


async def test_a_request_id_with_another_body_is_aborted(service):
    events = await run(service, image(options={"request_id": "once"}))
    error = await refusal(service.generation.GenerateImage(image(prompt="other", options={"request_id": "once"})))
    assert (error.code, error.reason) == ("ABORTED", "REQUEST_ID_REUSED")
    assert error.metadata == {"job_id": events[0].job_id}
