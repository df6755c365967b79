"""A real server on a real port, with the real engine and a fake worker, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from omni_grpc.checkpoint.registry import unfetched
from omni_grpc.client.channel import DIRECT
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.server import Server
from omni_grpc.server.server import Backend
from omni_grpc.store.open import open_storage
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.plan import Ready
from omni_grpc.types.request import Guidance, GuidanceNorm
from omni_grpc.types.spec import Defaults, Limits
from omni_grpc.v1 import (
    admin_pb2_grpc,
    artifact_pb2_grpc,
    event_pb2,
    generation_pb2,
    generation_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    model_pb2_grpc,
)
from omni_grpc.web.port import HttpPort
from tests.toy import toy_checkpoint

from .fake_executor import READY, FakeExecutor

CHECKPOINT = toy_checkpoint(
    limits=lambda configs: Limits(
        size_multiple=16, min_size=16, max_size=4096, max_pixels=2048 * 2048, max_prompt_tokens=77
    ),
    defaults=lambda configs: Defaults(
        width=64, height=32, steps=4, guidance=Guidance(true_cfg_scale=4.0, norm=GuidanceNorm.RENORM)
    ),
)


class Service:
    """The parts of a running server, and stubs that talk to it through `channel`."""

    def __init__(
        self,
        engine: Engine,
        server: Server,
        executor: FakeExecutor,
        fleet: Fleet | None = None,
        port: HttpPort | None = None,
    ) -> None:
        self._port = port
        self.engine = engine
        self.fleet = Fleet.of(engine) if fleet is None else fleet
        self.server = server
        self.executor = executor
        self.connect()

    @property
    def http(self) -> str:
        """The address of the HTTP port."""
        assert self._port is not None, "serving(http_port=0) has one"
        return self._port.address

    def connect(self) -> None:
        # a pool of its own, or a client that comes back would share the connection of the one that left
        options = (("grpc.use_local_subchannel_pool", 1), *DIRECT)
        self.channel = aio.insecure_channel(f"127.0.0.1:{self.server.port}", options=options)
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.jobs = job_pb2_grpc.JobServiceStub(self.channel)
        self.artifacts = artifact_pb2_grpc.ArtifactServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    async def create(self, **changes: Any) -> job_pb2.Job:
        response = await self.jobs.CreateJob(job_pb2.CreateJobRequest(generate_image=image(**changes)))
        return response.job

    async def get(self, job_id: str) -> job_pb2.Job:
        return (await self.jobs.GetJob(job_pb2.GetJobRequest(job_id=job_id))).job

    async def watch(self, job_id: str, **options: Any) -> list[event_pb2.JobEvent]:
        """Every event of a job, to its end."""
        call = self.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=job_id, **options))
        return [message.event async for message in call]

    async def finished(self, **changes: Any) -> job_pb2.Job:
        """A job that was made and has ended."""
        job = await self.create(**changes)
        await self.watch(job.job_id)
        return await self.get(job.job_id)


@contextlib.asynccontextmanager
async def serving(ready: Ready = READY, **settings: Any) -> AsyncIterator[Service]:
    config = EngineConfig.from_settings(**({"model": "toy", "port": 0, "restart_backoff": 0} | settings))
    executor = FakeExecutor(ready)
    async with served(config, Engine(config, CHECKPOINT, executor, open_storage(config)), executor) as service:
        yield service


@contextlib.asynccontextmanager
async def served(config: EngineConfig, engine: Engine, executor: FakeExecutor) -> AsyncIterator[Service]:
    """A server of an engine, with the HTTP port beside it where it has one."""
    server, fleet, ports = _server(config, engine)
    await server.start()
    service = Service(engine, server, executor, fleet, *ports)
    try:
        yield service
    finally:
        await service.channel.close()
        await server.stop()


def _server(config: EngineConfig, engine: Engine) -> tuple[Server, Fleet, list[HttpPort]]:
    ports: list[HttpPort] = []

    def http(backend: Backend) -> HttpPort:
        ports.append(HttpPort(backend))
        return ports[0]

    server = Server(Gate(fleet := Fleet.of(engine)), config, beside=[http] if config.http.on else ())
    return server, fleet, ports


@contextlib.asynccontextmanager
async def starting(**settings: Any) -> AsyncIterator[tuple[Service, asyncio.Task[int]]]:
    """A server that listens, and whose model is not even fetched."""
    config = EngineConfig.from_settings(**({"model": "org/toy", "served_model_name": "toy", "port": 0} | settings))
    executor = FakeExecutor()
    executor.loading.close()
    engine = Engine(config, unfetched(config.model), executor)
    server, fleet, ports = _server(config, engine)
    start = asyncio.create_task(server.start())
    await until(lambda: executor.starts == 1)
    service = Service(engine, server, executor, fleet, *ports)
    try:
        yield service, start
    finally:
        await service.channel.close()
        start.cancel()
        await server.stop()
        await asyncio.gather(start, return_exceptions=True)


def downloading(done: int) -> Loading:
    file = "vae/diffusion_pytorch_model.safetensors"
    return Loading(phase=LoadPhase.DOWNLOADING, component="vae", file=file, done_bytes=done, total_bytes=1000)


def image(**changes: Any) -> generation_pb2.GenerateImageRequest:
    """A small request. `sampling` and `options` are given as dicts."""
    values = {"model": "toy", "prompt": "a red circle", "width": 32, "height": 16}
    values["sampling"] = {"steps": 3, "seed": 7} | changes.pop("sampling", {})
    return generation_pb2.GenerateImageRequest(**(values | changes))


def kinds(events: list[event_pb2.JobEvent]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The status of a call that failed: its code, ErrorInfo and the other details by their type's name."""

    code: str
    message: str
    reason: str
    metadata: dict[str, str]
    details: dict[str, Any]

    @property
    def fields(self) -> list[str]:
        return [violation.field for violation in self.details["BadRequest"].field_violations]


async def to_error(call: AsyncIterable[Message]) -> tuple[list[Any], Refusal]:
    """Every message of a stream that must end in an error, and the error."""
    messages = []
    try:
        async for message in call:
            messages.append(message)
    except aio.AioRpcError as error:
        return messages, read_refusal(error)
    pytest.fail(f"the call ended OK, after {len(messages)} messages")


async def refusal(call: Awaitable[Message] | AsyncIterable[Message]) -> Refusal:
    """The refusal that a call must end in, before any message."""
    if isinstance(call, AsyncIterable):
        messages, error = await to_error(call)
        assert messages == []
        return error
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return read_refusal(caught.value)


async def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)


def read_refusal(error: aio.AioRpcError) -> Refusal:
    status = rpc_status.from_call(error)
    assert status is not None, f"no details: {error}"
    assert status.code == error.code().value[0]
    details = {detail.type_url.rpartition(".")[2]: unpack(detail) for detail in status.details}
    info = details["ErrorInfo"]
    assert info.domain == "omni_grpc"
    return Refusal(error.code().name, status.message, info.reason, dict(info.metadata), details)


def unpack(detail: Any) -> Any:
    message = getattr(error_details_pb2, detail.type_url.rpartition(".")[2])()
    assert detail.Unpack(message)
    return message
