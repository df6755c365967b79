"""`load_model` of both clients, against a server that does not have its model yet."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from omni_grpc.client import AsyncClient, Client, LoadEvent, Loading, LoadPhase, ModelReady
from omni_grpc.client.load import load_event
from omni_grpc.types.errors import DeadlineExceeded, FailedPrecondition, NotFound, Unimplemented
from omni_grpc.types.plan import Died
from omni_grpc.v1.admin_pb2 import LoadModelResponse
from tests.server.service import downloading, starting
from tests.server.test_load_model import GATED


async def events(kind: str, port: int, *arguments, **options) -> AsyncIterator[LoadEvent]:
    """The events of a client of that kind, one by one."""
    address = f"127.0.0.1:{port}"
    if kind == "async":
        async with AsyncClient(address) as client:
            async for event in client.load_model(*arguments, **options):
                yield event
        return
    with Client(address) as client:
        stream = client.load_model(*arguments, **options)
        while (event := await asyncio.to_thread(next, stream, None)) is not None:
            yield event


@pytest.fixture(params=["sync", "async"])
def kind(request):
    return request.param


async def test_the_events_are_typed_and_end_with_the_model(kind):
    async with starting() as (service, _):
        service.executor._deliver(downloading(10))
        stream = events(kind, service.server.port)
        assert await anext(stream) == downloading(10)
        service.executor._deliver(Loading(phase=LoadPhase.WARMING_UP))
        assert await anext(stream) == Loading(phase=LoadPhase.WARMING_UP)
        service.executor.loading.open()
        (last,) = [event async for event in stream]
        assert isinstance(last, ModelReady)
        assert last.model.name == "toy"
        assert [event async for event in events(kind, service.server.port, "toy")] == [last]


async def test_what_keeps_the_model_from_loading_is_raised(kind):
    async with starting() as (service, _):
        stream = events(kind, service.server.port)
        await anext(stream)
        service.executor._deliver(Died(failure=GATED))
        with pytest.raises(FailedPrecondition, match="ask for access") as caught:
            await anext(stream)
        assert caught.value.reason == "MODEL_GATED"


async def test_a_caller_can_run_out_of_patience_or_leave(kind):
    async with starting() as (service, _):
        with pytest.raises(DeadlineExceeded):
            [event async for event in events(kind, service.server.port, timeout=0.5)]
        with pytest.raises(NotFound):
            [event async for event in events(kind, service.server.port, "other")]
        stream = events(kind, service.server.port)
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(10):
            while service.server._calls.open_streams:  # noqa: ASYNC110 (nothing tells that a call has ended)
                await asyncio.sleep(0.01)


def test_a_phase_of_a_newer_server_is_not_passed_over():
    with pytest.raises(Unimplemented):
        load_event(LoadModelResponse(phase=99))
    assert str(load_event(LoadModelResponse(phase=1, done_bytes=2, total_bytes=3000))) == "downloading, 2 bytes of 3 kB"
