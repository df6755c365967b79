"""Starting, health, reflection, draining, stopping."""

import asyncio

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, EngineState
from omni_grpc.engine.scheduler import Lane
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.server import Server
from omni_grpc.types.errors import Code, ConfigError, Failure
from omni_grpc.types.plan import Died

from .fake_executor import FakeExecutor
from .service import CHECKPOINT, Service, image, kinds, refusal, serving, to_error, until

NAMES = ("GenerationService", "JobService", "ArtifactService", "ModelService", "AdminService")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def parts(**settings) -> tuple[Engine, Server, FakeExecutor]:
    config = EngineConfig.from_settings(**({"model": "toy", "port": 0} | settings))
    executor = FakeExecutor()
    engine = Engine(config, CHECKPOINT, executor)
    return engine, Server(Gate(Fleet.of(engine)), config), executor


async def health(service: Service, name: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(service.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def becomes(service: Service, name: str, status: int) -> None:
    call = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest(service=name))
    async with asyncio.timeout(60):
        while (await call.read()).status != status:
            pass
    call.cancel()


async def test_while_the_model_loads_the_server_lives_and_takes_no_jobs():
    engine, server, executor = parts()
    executor.loading.close()
    starting = asyncio.create_task(server.start())
    await until(lambda: server.port != 0)
    service = Service(engine, server, executor)
    assert (await health(service), await health(service, "liveness")) == (NOT_SERVING, SERVING)
    error = await refusal(service.generation.GenerateImage(image()))
    assert (error.code, error.reason) == ("UNAVAILABLE", "MODEL_LOADING")
    assert error.details["RetryInfo"].retry_delay.seconds == 1
    executor.loading.open()
    assert await starting == server.port
    await becomes(service, "", SERVING)
    assert [await health(service, f"omni_grpc.v1.{name}") for name in NAMES] == [SERVING] * 5
    await service.channel.close()
    await server.stop()


async def test_health_follows_the_worker(service):
    service.executor.loading.close()
    await service.executor.die()
    await becomes(service, "", NOT_SERVING)
    await becomes(service, "omni_grpc.v1.JobService", NOT_SERVING)
    assert await health(service, "liveness") == SERVING, "the server brings its worker back by itself"
    service.executor.loading.open()
    await becomes(service, "", SERVING)
    await becomes(service, "omni_grpc.v1.JobService", SERVING)
    stub = health_pb2_grpc.HealthStub(service.channel)
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="nothing"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_every_service(service):
    stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    (response,) = [message async for message in call]
    listed = {found.name for found in response.list_services_response.service}
    assert listed == {
        *(f"omni_grpc.v1.{name}" for name in NAMES),
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_a_second_server_on_the_port_fails_and_says_why(service):
    engine, server, _ = parts(port=service.server.port)
    with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{service.server.port}: the port is in use"):
        await server.start()
    assert engine.state is EngineState.STARTING, "no worker was started for it"
    assert kinds(await service.watch((await service.create()).job_id))[-1] == "completed"


async def test_an_address_of_another_machine_is_refused():
    _, server, _ = parts(host="192.0.2.1", insecure=True)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: .*address"):
        await server.start()


async def test_a_worker_that_cannot_load_leaves_nothing_running():
    engine, server, executor = parts()
    executor.loading.close()
    starting = asyncio.create_task(server.start())
    await until(lambda: server.port != 0 and executor.starts == 1)
    executor._deliver(Died(failure=Failure(code=Code.FAILED_PRECONDITION, reason="BAD_CHECKPOINT", message="torn")))
    with pytest.raises(Exception, match="torn"):
        await starting
    assert engine.state is EngineState.STOPPED
    _, second, _ = parts(port=server.port)
    await second.start()
    await second.stop()


async def test_draining_lets_jobs_end_and_their_streams_with_them():
    async with serving() as service:
        service.executor.gates[Lane.STEP].close()
        call = aiter(service.generation.GenerateImage(image()))
        first = await anext(call)
        stopping = asyncio.create_task(service.server.stop(drain=60))
        await becomes(service, "", NOT_SERVING)
        assert await health(service, "liveness") == SERVING
        error = await refusal(service.generation.GenerateImage(image()))
        assert (error.code, error.reason) == ("UNAVAILABLE", "ENGINE_DRAINING")
        service.executor.gates[Lane.STEP].open()
        events = [first.event, *[message.event async for message in call]]
        assert kinds(events)[-1] == "completed"
        await stopping
    assert service.engine.state is EngineState.STOPPED


async def test_jobs_that_outlast_the_drain_fail_as_retryable_and_their_watchers_hear_it():
    async with serving() as service:
        service.executor.gates[Lane.STEP].close()
        job = await service.create()
        watching = asyncio.create_task(service.watch(job.job_id))
        generating = asyncio.create_task(to_error(service.generation.GenerateImage(image())))
        await until(lambda: len(service.engine.jobs) == 2 and service.engine.jobs.get(job.job_id).watchers == 1)
        await service.server.stop(drain=0.05)
        (watched, (streamed, error)) = await asyncio.gather(watching, generating)
    assert (error.code, error.reason) == ("UNAVAILABLE", "SERVER_STOPPED")
    for event in (watched[-1], streamed[-1].event):
        assert event.failed.retryable
        assert event.failed.status.code == 14


async def test_a_drain_can_be_cut_short():
    async with serving() as service:
        service.executor.gates[Lane.STEP].close()
        job = await service.create()
        watching = asyncio.create_task(service.watch(job.job_id))
        await until(lambda: service.engine.jobs.get(job.job_id).watchers == 1)
        stopping = asyncio.create_task(service.server.stop(drain=600))
        await until(lambda: service.engine.state is EngineState.DRAINING)
        await service.server.stop()
        assert kinds(await watching)[-1] == "failed"
        await asyncio.wait_for(stopping, 30)


async def test_a_message_far_over_the_limit_is_refused_without_being_read():
    async with serving(max_message_bytes=1 << 20) as service:
        with pytest.raises(aio.AioRpcError) as caught:
            await service.generation.GenerateImage(image(prompt="x" * (3 << 20))).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
