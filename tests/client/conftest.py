"""A real server, a proxy in front of it, and both clients behind one face."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omni_grpc.client import AsyncClient, Reconnect
from tests.client.proxy import Proxy
from tests.client.threaded import ThreadedClient
from tests.server.service import Service, serving

KINDS = {"sync": ThreadedClient, "async": AsyncClient}
RECONNECT = Reconnect(attempts=6, first_delay=0.01, longest_delay=0.1)


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    async with serving() as running:
        yield running


@pytest_asyncio.fixture
async def proxy(service: Service) -> AsyncIterator[Proxy]:
    running = await Proxy(service.server.port).start()
    yield running
    await running.stop()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    """The class of a client."""
    return KINDS[request.param]


@pytest_asyncio.fixture
async def client(kind: Any, proxy: Proxy) -> AsyncIterator[Any]:
    """A client that goes through the proxy."""
    async with kind(f"127.0.0.1:{proxy.port}", reconnect=RECONNECT) as connected:
        yield connected
