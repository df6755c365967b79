"""Both clients against a real server: what comes back is what the server made, and every refusal is its exception."""

import asyncio
import hashlib

import pytest

from omni_grpc.client import AsyncClient, Client, Retry
from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import (
    Aborted,
    Code,
    DeadlineExceeded,
    Failure,
    InvalidArgument,
    NotFound,
    OperationCancelled,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import GuidanceNorm
from omni_grpc.types.version import __version__
from omni_grpc.v1.event_pb2 import JOB_STATE_CANCELLED, JOB_STATE_QUEUED, JOB_STATE_RUNNING, JOB_STATE_SUCCEEDED
from tests.client.proxy import Proxy
from tests.client.threaded import whole
from tests.server.fake_executor import picture
from tests.server.service import kinds, serving


async def test_the_result_is_what_the_server_made(client, service):
    result = await client.generate_image(
        "a red circle", width=48, height=32, steps=3, seeds=[11, 5], negative_prompt="", true_cfg_scale=2.0
    )
    expected = tuple(picture(48, 32, seed, ImageFormat.PNG) for seed in (11, 5))
    assert result.files == expected
    assert result.seeds == (11, 5)
    assert [artifact.sha256 for artifact in result.artifacts] == [hashlib.sha256(data).hexdigest() for data in expected]
    job = service.engine.jobs.get(result.job_id)
    assert (result.effective, result.warnings, result.artifacts) == (job.effective, job.warnings, job.artifacts)
    assert result.effective.guidance.norm is GuidanceNorm.RENORM
    assert result.stats.steps_run == 3
    assert result.stats.total == pytest.approx(job.stats.total, abs=1e-6)
    assert [image.size for image in result.images] == [(48, 32), (48, 32)]


async def test_unset_and_empty_negative_prompts_differ(client):
    without = await client.generate_image("x", true_cfg_scale=3.0)
    assert [warning.code for warning in without.warnings] == ["CFG_OFF"]
    assert without.effective.guidance.true_cfg_scale == 1.0
    with_empty = await client.generate_image("x", true_cfg_scale=3.0, negative_prompt="")
    assert with_empty.effective.guidance.true_cfg_scale == 3.0


async def test_a_stream_gives_every_event_and_the_result(client, service):
    async with await client.stream("x", steps=2, seed=4, output_format="raw_rgb8") as stream:
        assert stream.job_id in service.engine.jobs
        events = [event async for event in stream]
        result = await stream.result()
    assert whole(events)
    assert list(dict.fromkeys(kinds(events))) == [
        "queued", "started", "encode_done", "step_progress", "decode_progress", "artifact_ready", "completed",
    ]  # fmt: skip
    assert [event.step_progress.step for event in events if event.HasField("step_progress")][-1] == 2
    assert result.files == (picture(64, 32, 4, ImageFormat.RAW_RGB8),)
    assert result.images[0].tobytes() == result.files[0]


async def test_both_clients_give_the_same(service):
    address = f"127.0.0.1:{service.server.port}"
    with Client(address) as client:
        one = await asyncio.to_thread(client.generate_image, "x", seed=3, steps=2)
        events = await asyncio.to_thread(lambda: list(client.watch_job(one.job_id)))
    async with AsyncClient(address) as client:
        other = await client.generate_image("x", seed=3, steps=2)
        others = [event async for event in client.watch_job(other.job_id)]
    assert (one.files, one.effective, one.seeds) == (other.files, other.effective, other.seeds)
    assert [(event.seq, event.WhichOneof("event")) for event in events] == [
        (event.seq, event.WhichOneof("event")) for event in others
    ]


async def test_heartbeats_are_not_handed_out(kind):
    async with serving(heartbeat_interval=0.05) as service, kind(f"127.0.0.1:{service.server.port}") as client:
        service.executor.gates[Lane.STEP].close()
        async with await client.stream("x", steps=1) as stream, asyncio.TaskGroup() as group:
            events = group.create_task(_collect(stream))
            await asyncio.sleep(0.3)  # time for heartbeats
            service.executor.gates[Lane.STEP].open()
        assert None not in kinds(events.result())
        assert "heartbeat" not in kinds(events.result())
        assert kinds(events.result())[-1] == "completed"


async def _collect(stream):
    return [event async for event in stream]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "reason", "fields"),
    [
        ({"width": 20}, InvalidArgument, "INVALID_ARGUMENT", ["width"]),
        ({"steps": 0, "width": 20}, InvalidArgument, "INVALID_ARGUMENT", ["width", "sampling.steps"]),
        ({"seed": 1, "seeds": [1]}, InvalidArgument, "INVALID_ARGUMENT", ["sampling.seed, sampling.seeds"]),
        ({"seed": 2**60}, InvalidArgument, "INVALID_ARGUMENT", ["sampling.seeds"]),
        ({"height": -1}, InvalidArgument, "INVALID_ARGUMENT", ["height"]),
        ({"model": "nope"}, NotFound, "MODEL_NOT_FOUND", []),
    ],
)  # fmt: skip
async def test_refusals(client, service, options, error, reason, fields):
    for name in ("generate_image", "stream", "create_job"):
        with pytest.raises(error) as caught:
            await getattr(client, name)("x", **options)
        assert caught.value.reason == reason
        assert [violation.field for violation in caught.value.violations] == fields
        assert str(caught.value)
    assert len(service.engine.jobs) == 0


async def test_a_full_queue_says_when_to_come_back(kind):
    once = Retry(attempts=0)
    async with serving(max_queue=1) as service, kind(f"127.0.0.1:{service.server.port}", retry=once) as client:
        service.executor.gates[Lane.PREPARE].close()
        for _ in range(2):
            await client.create_job("x")
        for call in (client.generate_image("x"), client.create_job("x")):
            with pytest.raises(ResourceExhausted) as caught:
                await call
            assert caught.value.reason == "QUEUE_FULL"
            assert caught.value.failure.retry_after == 1.0


async def test_a_full_queue_is_waited_for(kind):
    """By a call that makes a job, and by one that streams it: each asks again when the server said."""
    async with serving(max_queue=1) as service, kind(f"127.0.0.1:{service.server.port}") as client:
        gate = service.executor.gates[Lane.PREPARE]
        gate.close()
        for _ in range(2):
            await client.create_job("x")
        waiting = [asyncio.create_task(call) for call in (client.generate_image("x"), client.create_job("x"))]
        await asyncio.sleep(0.3)
        assert not any(call.done() for call in waiting)
        assert len(service.engine.jobs) == 2
        gate.open()
        result, job = await asyncio.gather(*waiting)
        assert (await service.get(result.job_id)).job_id == result.job_id
        assert job.job_id != result.job_id


async def test_a_wait_that_the_deadline_does_not_leave_is_no_wait(kind):
    async with serving(max_queue=1) as service, kind(f"127.0.0.1:{service.server.port}") as client:
        service.executor.gates[Lane.PREPARE].close()
        for _ in range(2):
            await client.create_job("x")
        with pytest.raises(ResourceExhausted):
            await client.generate_image("x", timeout=0.9)


async def test_what_is_not_there(client):
    for call in (client.get_job("job_x"), client.cancel_job("job_x"), client.watch_job("job_x").result()):
        with pytest.raises(NotFound) as caught:
            await call
        assert caught.value.reason == "JOB_NOT_FOUND"
    with pytest.raises(NotFound) as caught:
        await client.download("art_x")
    assert caught.value.reason == "ARTIFACT_NOT_FOUND"


async def test_a_failed_job_raises_what_ended_it(client, service):
    failure = Failure(code=Code.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", message="no room", retry_after=2.0)
    service.executor.failures[Lane.STEP] = failure
    async with await client.stream("x") as stream:
        with pytest.raises(ResourceExhausted) as caught:
            await stream.result()
    assert (caught.value.reason, caught.value.failure.retry_after) == ("OUT_OF_MEMORY", 2.0)
    assert caught.value.failure.metadata["job_id"] == stream.job_id
    for after_seq in (0, service.engine.jobs.get(stream.job_id).last_seq):
        watched = client.watch_job(stream.job_id, after_seq)
        events = await _collect(watched)
        assert kinds(events)[-1:] == ([] if after_seq else ["failed"])
        assert watched.error.failure == caught.value.failure
        with pytest.raises(ResourceExhausted):
            await watched.result()


async def test_a_server_that_stops_fails_the_job_as_retryable(client, service):
    service.executor.gates[Lane.STEP].close()
    async with await client.stream("x") as stream:
        result = asyncio.ensure_future(stream.result())
        await service.engine.close()
        with pytest.raises(Unavailable) as caught:
            await result
    assert (caught.value.reason, caught.value.failure.retryable) == ("SERVER_STOPPED", True)


# --- cancelling -------------------------------------------------------------------------------------------------------


async def test_cancel_from_another_client(client, kind, service):
    service.executor.gates[Lane.STEP].close()
    service.executor.gates[Lane.STEP].let(2)
    async with await client.stream("x", steps=9) as stream, kind(f"127.0.0.1:{service.server.port}") as other:
        async for event in stream:
            if event.step_progress.step == 2:
                await other.cancel_job(stream.job_id, "enough")
            if event.HasField("cancelled"):
                break
        with pytest.raises(OperationCancelled, match="after 2 steps: enough") as caught:
            await anext(aiter(stream))
    assert event.cancelled.completed_steps == 2
    assert (caught.value.reason, caught.value.failure.metadata) == ("JOB_CANCELLED", {"job_id": stream.job_id})


async def test_a_stream_can_cancel_its_own_job(client, service):
    service.executor.gates[Lane.STEP].close()
    async with await client.stream("x") as stream:
        assert (await stream.cancel("mine")).cancel_requested
        with pytest.raises(OperationCancelled, match="mine"):
            await stream.result()


async def test_leaving_early_cancels_and_letting_go_does_not(client, service):
    service.executor.gates[Lane.STEP].close()
    async with await client.stream("x") as stream:
        pass
    job = await client.get_job(stream.job_id)
    assert job.state == JOB_STATE_CANCELLED
    assert service.engine.jobs.get(stream.job_id).entries[-1].event.reason == "the client left the stream"
    kept = await client.stream("x")
    await kept.close()
    assert (await client.get_job(kept.job_id)).state == JOB_STATE_RUNNING


async def test_a_watcher_leaves_the_job_alone(client, service):
    service.executor.gates[Lane.STEP].close()
    job = await client.create_job("x", seed=1)
    async with client.watch_job(job.job_id) as stream:
        async for _ in stream:
            break
    assert (await client.get_job(job.job_id)).state in (JOB_STATE_QUEUED, JOB_STATE_RUNNING)
    service.executor.gates[Lane.STEP].open()
    assert (await client.watch_job(job.job_id).result()).files == (picture(64, 32, 1, ImageFormat.PNG),)


async def test_patience_that_ends_cancels_the_job(client, service):
    service.executor.gates[Lane.STEP].close()
    with pytest.raises(DeadlineExceeded) as caught:
        await client.generate_image("x", timeout=1.0)
    assert caught.value.reason == "CALL_DEADLINE"
    job = service.engine.jobs.get(caught.value.failure.metadata["job_id"])
    assert job.state == "CANCELLED"


async def test_a_cancelled_task_cancels_the_job(service):
    service.executor.gates[Lane.STEP].close()
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def generate(client):
        async with await client.stream("x") as stream:
            started.set_result(stream.job_id)
            await stream.result()

    async with AsyncClient(f"127.0.0.1:{service.server.port}") as client:
        task = asyncio.create_task(generate(client))
        job_id = await started
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert service.engine.jobs.get(job_id).entries[-1].event.reason == "the client's task was cancelled"


# --- jobs, artifacts, models ------------------------------------------------------------------------------------------


async def test_a_created_job_gives_the_same_images(client):
    job = await client.create_job("x", seed=9, num_outputs=2, labels={"team": "red"})
    result = await client.watch_job(job.job_id).result()
    assert result.files == tuple(picture(64, 32, seed, ImageFormat.PNG) for seed in (9, 10))
    assert result.files == (await client.generate_image("x", seed=9, num_outputs=2)).files
    assert await client.download(result.artifacts[1].artifact_id) == result.files[1]
    assert (await client.get_job(job.job_id)).state == JOB_STATE_SUCCEEDED


async def test_watching_from_a_position(client):
    job = await client.create_job("x", steps=2)
    await client.watch_job(job.job_id).result()
    events = await _collect(client.watch_job(job.job_id))
    assert [event.seq for event in events] == list(range(1, 9))
    assert await _collect(client.watch_job(job.job_id, 4)) == events[4:]
    assert await _collect(client.watch_job(job.job_id, len(events))) == []
    for after_seq in (len(events) - 1, len(events)):  # a result needs no event to be seen
        assert (await client.watch_job(job.job_id, after_seq).result()).job_id == job.job_id
    with pytest.raises(OutOfRange):
        await _collect(client.watch_job(job.job_id, 999))


async def test_the_same_request_id_is_the_same_job(client):
    first = await client.create_job("x", request_id="mine", seed=1)
    assert (await client.create_job("x", request_id="mine", seed=1)).job_id == first.job_id
    with pytest.raises(Aborted) as caught:
        await client.create_job("x", request_id="mine", seed=2)
    assert caught.value.reason == "REQUEST_ID_REUSED"
    assert first.request_id == "mine"


async def test_listing_jobs(client, service):
    finished = [await client.create_job("x", labels={"n": str(n)}) for n in range(2)]
    for job in finished:
        await _collect(client.watch_job(job.job_id))
    service.executor.gates[Lane.PREPARE].close()
    waiting = [await client.create_job("x") for _ in range(120)]
    newest = [job.job_id for job in reversed([*finished, *waiting])]
    assert [job.job_id for job in await client.list_jobs(limit=200)] == newest
    assert [job.job_id for job in await client.list_jobs(limit=110)] == newest[:110]
    assert [job.job_id for job in await client.list_jobs(states=["succeeded"])] == newest[-2:]
    assert [job.job_id for job in await client.list_jobs(labels={"n": "0"})] == [finished[0].job_id]


async def test_what_the_server_is(client):
    (model,) = await client.list_models()
    assert (model.name, model.limits.default_width, model.defaults.steps) == ("toy", 64, 4)
    assert (await client.server_info()).version == __version__


async def test_a_model_in_the_making_is_unavailable(kind):
    """The refusal of a server that starts is retried by gRPC, and raised with its reason when that does not help."""
    async with serving() as service, kind(f"127.0.0.1:{service.server.port}") as client:
        await service.engine.close()
        with pytest.raises(Unavailable) as caught:
            await client.generate_image("x")
        assert caught.value.reason == "ENGINE_STOPPED"


async def test_a_server_that_is_not_there(kind):
    proxy = await Proxy(1).start()
    proxy.refuse = True
    async with kind(f"127.0.0.1:{proxy.port}") as client:
        with pytest.raises(Unavailable, match=f"127.0.0.1:{proxy.port}") as caught:
            await client.generate_image("x", model="toy")
    assert caught.value.reason == "SERVER_UNREACHABLE"
    assert proxy.connections > 1  # gRPC tried again
    await proxy.stop()


async def test_an_address_without_a_port_is_refused(kind):
    with pytest.raises(InvalidArgument, match="localhost:50051"):
        kind("localhost")


def test_the_asyncio_client_needs_a_running_loop():
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncClient("127.0.0.1:1")
