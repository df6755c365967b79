from collections.abc import AsyncIterator

import pytest_asyncio

from .service import Service, serving


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    async with serving() as running:
        yield running
