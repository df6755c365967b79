import re
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest_asyncio

from tests.server.service import Service, serving
from tests.server.studio import serving_studio

ANYTHING = "any"


def client_of(service: Service, **options: object) -> openai.AsyncOpenAI:
    """The official client, as anybody makes one."""
    values = {"base_url": service.http + "/v1", "api_key": ANYTHING, "max_retries": 0} | options
    return openai.AsyncOpenAI(http_client=httpx2.AsyncClient(trust_env=False), **values)  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    """A model that makes pictures from prompts."""
    async with serving(http_port=0) as running:
        yield running


@pytest_asyncio.fixture
async def client(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(service) as made:
        yield made


@pytest_asyncio.fixture
async def http(service: Service) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=service.http, timeout=30, trust_env=False) as made:
        yield made


@pytest_asyncio.fixture
async def studio() -> AsyncIterator[Service]:
    """A model that does every task."""
    async with serving_studio(http_port=0) as running:
        yield running


@pytest_asyncio.fixture
async def editor(studio: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(studio) as made:
        yield made


@pytest_asyncio.fixture
async def forms(studio: Service) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=studio.http, timeout=30, trust_env=False) as made:
        yield made


def code(page: str, language: str) -> list[str]:
    """The blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
