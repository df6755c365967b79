"""A real server, and the command line against it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from omni_grpc.cli.main import main
from tests.server.service import Service, serving


@dataclasses.dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Awaitable[Ran]]


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    async with serving() as running:
        yield running


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line in a thread, since the server lives on this one. A usage error is its exit code."""

    def call(*arguments: object) -> int:
        try:
            return main([str(argument) for argument in arguments])
        except SystemExit as stop:
            return int(stop.code or 0)

    async def run(*arguments: object) -> Ran:
        code = await asyncio.to_thread(call, *arguments)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def server(service: Service) -> tuple[str, str]:
    """The flags that name the server."""
    return "--server", f"127.0.0.1:{service.server.port}"
