"""LoadModel: how far the model is, from a server that listens before it has one."""

import asyncio
import time
from collections.abc import AsyncIterator

from omni_grpc.engine import EngineState
from omni_grpc.gate import operation
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.plan import Died, Fetched
from omni_grpc.v1 import admin_pb2, artifact_pb2, job_pb2, model_pb2

from .service import CHECKPOINT, Service, downloading, image, kinds, refusal, serving, starting, to_error

DOWNLOADING, LOADING, WARMING_UP, READY = range(1, 5)
GATED = Failure(code=Code.FAILED_PRECONDITION, reason="MODEL_GATED", message="toy is gated: ask for access")


def load(service: Service, model: str = "toy") -> AsyncIterator[admin_pb2.LoadModelResponse]:
    return aiter(service.admin.LoadModel(admin_pb2.LoadModelRequest(model=model)))


async def test_the_present_state_comes_first_then_each_change_and_the_model_last():
    async with starting() as (service, start):
        tell = service.executor._deliver
        tell(downloading(10))
        call = load(service)
        first = await anext(call)
        assert (first.phase, first.component, first.done_bytes, first.total_bytes) == (DOWNLOADING, "vae", 10, 1000)
        assert first.file == "vae/diffusion_pytorch_model.safetensors"
        tell(downloading(20))
        assert (await anext(call)).done_bytes == 20
        tell(Fetched(checkpoint=CHECKPOINT))
        tell(Loading())
        assert await anext(call) == admin_pb2.LoadModelResponse(phase=LOADING)
        tell(Loading(phase=LoadPhase.WARMING_UP))
        assert await anext(call) == admin_pb2.LoadModelResponse(phase=WARMING_UP)
        service.executor.loading.open()
        last = [message async for message in call]
        assert [message.phase for message in last] == [READY]
        assert (last[0].model.name, last[0].model.state) == ("toy", model_pb2.MODEL_STATE_READY)
        assert last[0].model.limits.size_multiple == 16
        await start
        assert [message.phase async for message in load(service)] == [READY], "once it is ready, at once"
        assert kinds(await service.watch((await service.create()).job_id))[-1] == "completed"


async def test_messages_come_at_a_limited_rate():
    async with starting() as (service, _):
        messages = []

        async def read():
            async for message in load(service):
                messages.append(message)

        reading, began = asyncio.create_task(read()), time.monotonic()
        for done in range(60):
            service.executor._deliver(downloading(done))
            await asyncio.sleep(0.01)
        took = time.monotonic() - began
        service.executor.loading.open()
        await reading
    assert 2 <= len(messages) <= took / operation.LOAD_INTERVAL + 2
    counts = [message.done_bytes for message in messages[:-1]]
    assert counts == sorted(set(counts))


async def test_the_last_message_does_not_wait(monkeypatch):
    monkeypatch.setattr(operation, "LOAD_INTERVAL", 3600)
    async with starting() as (service, _), asyncio.timeout(60):
        call = load(service)
        await anext(call)
        service.executor.loading.open()
        assert [message.phase async for message in call] == [READY]


async def test_a_silent_phase_gives_signs_of_life():
    async with starting(heartbeat_interval=0.3) as (service, _):
        service.executor._deliver(Loading())
        call = load(service)
        began = time.monotonic()
        assert await anext(call) == await anext(call) == admin_pb2.LoadModelResponse(phase=LOADING)
        assert time.monotonic() - began >= 0.3


async def test_what_keeps_the_model_from_loading_ends_the_call():
    async with starting() as (service, start):
        call = load(service)
        await anext(call)
        service.executor._deliver(Died(failure=GATED))
        messages, error = await to_error(call)
        assert messages == []
        assert (error.code, error.reason, error.message) == ("FAILED_PRECONDITION", "MODEL_GATED", GATED.message)
        assert (await asyncio.gather(start, return_exceptions=True))[0].failure == GATED


async def test_a_server_that_is_stopped_while_it_loads_says_so():
    async with starting() as (service, start):
        call = load(service)
        await anext(call)
        start.cancel()
        _, error = await to_error(call)
    assert (error.code, error.reason) == ("UNAVAILABLE", "SERVER_STOPPED")


async def test_the_call_follows_the_next_worker_too():
    async with serving() as service:
        service.executor.loading.close()
        await service.executor.die()
        call = load(service)
        assert (await anext(call)).phase == LOADING
        service.executor.loading.open()
        assert [message.phase async for message in call] == [READY]


async def test_only_the_model_of_the_server_can_be_asked_for_and_only_as_it_is(service):
    assert (await refusal(service.admin.LoadModel(admin_pb2.LoadModelRequest(model="other")))).reason == (
        "MODEL_NOT_FOUND"
    )
    (ready,) = [message async for message in service.admin.LoadModel(admin_pb2.LoadModelRequest())]
    assert ready.model.name == "toy"
    request = admin_pb2.LoadModelRequest(model="toy")
    request.engine_options["dtype"] = "float32"
    error = await refusal(service.admin.LoadModel(request))
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "MODEL_LOADED")


async def test_before_the_model_is_here_every_call_has_an_answer():
    async with starting() as (service, _):
        service.executor._deliver(downloading(250))
        (found,) = (await service.models.ListModels(model_pb2.ListModelsRequest())).models
        assert (found.name, found.state, found.family) == ("toy", model_pb2.MODEL_STATE_LOADING, "")
        assert (found.HasField("limits"), found.HasField("error"), list(found.refusals)) == (False, False, [])
        assert (await service.models.GetModel(model_pb2.GetModelRequest(model="toy"))).model == found
        for call in (
            service.generation.GenerateImage(image()),
            service.jobs.CreateJob(job_pb2.CreateJobRequest(generate_image=image())),
        ):
            error = await refusal(call)
            assert (error.code, error.reason, error.metadata) == (
                "UNAVAILABLE", "MODEL_LOADING", {"phase": "DOWNLOADING"},
            )  # fmt: skip
            assert "downloading vae, 250 bytes of 1 kB" in error.message
            assert error.details["RetryInfo"].retry_delay.seconds == 1
        error = await refusal(service.generation.GenerateImage(image(model="other")))
        assert error.reason == "MODEL_NOT_FOUND", "waiting would not help"
        assert (await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())).max_queue == 256
        stats = (await service.admin.GetServerStats(admin_pb2.GetServerStatsRequest())).stats
        assert (dict(stats.queued_by_model), stats.draining) == ({"toy": 0}, False)
        assert list((await service.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs) == []
        assert (await refusal(service.jobs.GetJob(job_pb2.GetJobRequest(job_id="job_0")))).reason == "JOB_NOT_FOUND"
        header = artifact_pb2.UploadHeader(mime_type="image/png", size_bytes=1)
        parts = [artifact_pb2.UploadAssetRequest(header=header), artifact_pb2.UploadAssetRequest(data=b"x")]
        assert (await service.artifacts.UploadAsset(iter(parts))).size_bytes == 1, "media can be sent ahead"
        assert service.engine.state is EngineState.STARTING
