"""One server takes over from another one while clients call: no call is refused, and none is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from grpc import aio

from omni_grpc.v1 import generation_pb2_grpc

from .callers import Seen, calling, probing
from .process import Process, served

CALLS = 200
"""Generate calls that have to go through, at least."""


@contextlib.contextmanager
def taking_over(
    checkpoint: Path, folder: Path, *flags: str
) -> Iterator[Callable[[str], contextlib.AbstractContextManager[Process]]]:
    """Servers of one command line, each by its name."""

    def one(name: str) -> contextlib.AbstractContextManager[Process]:
        (folder / name).mkdir()
        handover = (
            "--handover",
            str(folder / "next.sock"),
            "--handover-seconds",
            "1",
            "--warm-up-seconds",
            "0",
            "--log-level",
            "debug",
        )
        return served(checkpoint, folder / name, *handover, *flags)

    yield one


def count(server: Process) -> int:
    """The generate calls that it has answered."""
    return server.log.read_text().count("GenerationService/GenerateImage OK")


def http_of(server: Process) -> str:
    (line,) = (line for line in server.log.read_text().splitlines() if "HTTP listens on" in line)
    return line.rpartition(" ")[2]


async def handed_over(first: Process, start: Callable[[], Process], seen: Seen, http: str | None = None) -> Process:
    """The second server, once it has taken over from the first amid the calls, and the first has ended."""

    async def call(channel: aio.Channel) -> None:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        kinds = [message.event.WhichOneof("event") async for message in stub.GenerateImage(first.image(steps=1))]
        seen.ends["completed" if "completed" in kinds else str(kinds[-1:])] += 1

    clients = [asyncio.create_task(calling(first.address, seen, call, anew=bool(number % 2))) for number in range(4)]
    if http is not None:
        clients.append(asyncio.create_task(probing(http, seen)))
    second = await asyncio.to_thread(start)
    code = await asyncio.to_thread(first.popen.wait, 120)
    assert code == 0, first.log.read_text()[-3000:]
    before = sum(seen.ends.values())
    while seen.ends["completed"] < CALLS or sum(seen.ends.values()) < before + 20:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    seen.over = True
    await asyncio.gather(*clients)
    return second


@pytest.mark.timeout(600)  # two servers load, beside each other and clients
async def test_no_call_is_refused_or_lost_while_one_server_takes_over_from_another(
    tiny_qwen_image: Path, tmp_path: Path
) -> None:
    seen = Seen()
    with contextlib.ExitStack() as stack, taking_over(tiny_qwen_image, tmp_path, "--http-port", "0") as server:
        first = stack.enter_context(server("first"))
        second = await handed_over(first, lambda: stack.enter_context(server("second")), seen, http_of(first))
        assert second.address == first.address
        assert http_of(second) == http_of(first)
        assert seen.errors == []
        assert seen.ends.keys() == {"completed", "http 200"}
        assert seen.ends["completed"] >= CALLS
        assert count(first) > 0
        assert count(second) > 0
        assert count(first) + count(second) == seen.ends["completed"]
        assert second.stop()[0] == 0
    assert not (tmp_path / "next.sock").exists()
