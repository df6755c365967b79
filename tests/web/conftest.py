from collections.abc import AsyncIterator

import httpx2
import pytest_asyncio

from tests.server.service import Service, serving


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    async with serving(http_port=0) as running:
        yield running


@pytest_asyncio.fixture
async def http(service: Service) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=service.http, timeout=30, trust_env=False) as client:
        yield client
