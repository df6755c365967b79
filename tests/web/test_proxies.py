"""The examples of docs/examples, run: nginx and Envoy before a real server, and streams that arrive as they happen."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx2
import pytest
from grpc import aio

from omni_grpc.client.channel import DIRECT
from omni_grpc.engine.scheduler import Lane
from omni_grpc.v1 import generation_pb2, generation_pb2_grpc
from tests.server.service import Service, image, serving, until

from .calling import FORMATS, stream

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
REQUIRED = os.environ.get("TESTS_REQUIRE_PROXIES") == "1"
pytestmark = pytest.mark.service


def program(name: str) -> str | None:
    if name == "nginx":
        return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    found = importlib.util.find_spec("envoy")
    if found is None or found.origin is None:
        return None
    return str(Path(found.origin).parent / "_bin" / "envoy")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(name: str, ports: Mapping[int, int], folder: Path, example: str = "") -> Iterator[None]:
    """The example with other ports: those of this test instead of the ones that it has."""
    binary = program(name)
    if binary is None:
        if REQUIRED:
            pytest.fail(f"{name} is not installed")
        pytest.skip(f"{name} is not installed")
    example = example or ("nginx.conf" if name == "nginx" else "envoy.yaml")
    text = (EXAMPLES / example).read_text(encoding="utf-8")
    for number, ours in ports.items():
        assert str(number) in text
        text = text.replace(f"{number}", f"{ours}")
    file = folder / example
    file.write_text(text, encoding="utf-8")
    command = [binary, "-c", str(file), "--disable-hot-restart"]
    if name == "nginx":
        places = f"daemon off; pid {folder}/pid; error_log {folder}/error.log;"
        command = [binary, "-c", str(file), "-p", str(folder), "-g", places]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            until = time.monotonic() + 30
            while not all(listens(port) for port in ports.values()):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < until, (folder / "log").read_text()
                time.sleep(0.05)
            yield
        finally:
            process.terminate()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("name", ["nginx", "envoy"])
async def test_a_proxy_of_the_examples_passes_everything_on(name, tmp_path):
    async with serving(http_port=0) as service:
        there = {8080: int(service.http.rpartition(":")[2]), 50051: service.server.port}
        here = {8081: free_port(), 50052: free_port()} if name == "nginx" else {8082: free_port()}
        http, grpc = (*here.values(), *here.values())[:2]
        with running(name, here | there, tmp_path):
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{http}", timeout=30, trust_env=False) as client:
                for form in FORMATS:
                    await streams_as_it_happens(service, client, form)
                await files(client)
            async with aio.insecure_channel(f"127.0.0.1:{grpc}", options=DIRECT) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                events = [message.event async for message in stub.GenerateImage(image())]
                assert events[-1].HasField("completed")


def jobs_of(service: Service) -> int:
    stats = service.engine.stats()
    return int(stats.queued + stats.running)


async def test_envoy_spreads_calls_and_leaves_out_a_server_that_drains(tmp_path):
    async with serving() as one, serving() as two:
        both = {50051: one.server.port, 50053: two.server.port}
        proxy = free_port()
        with running("envoy", {8082: proxy} | both, tmp_path, "envoy-fleet.yaml"):
            async with aio.insecure_channel(f"127.0.0.1:{proxy}", options=DIRECT) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)

                async def generate() -> bool:
                    events = [message.event async for message in stub.GenerateImage(image(), wait_for_ready=True)]
                    return events[-1].HasField("completed")

                one.executor.gates[Lane.STEP].close()
                two.executor.gates[Lane.STEP].close()
                calls = [asyncio.create_task(generate()) for _ in range(6)]
                await until(lambda: jobs_of(one) + jobs_of(two) == 6)
                assert min(jobs_of(one), jobs_of(two)) >= 1, "one connection, both servers"
                closing = asyncio.create_task(one.engine.close(60))
                one.executor.gates[Lane.STEP].open()
                two.executor.gates[Lane.STEP].open()
                # Envoy may not have heard of it yet: whoever is refused by the one is served by the other
                calls += [asyncio.create_task(generate()) for _ in range(6)]
                assert await asyncio.gather(*calls) == [True] * 12
                await closing


async def streams_as_it_happens(service, client, form):
    """Each step is seen before the next one is taken: nothing on the way holds events back."""
    gate = service.executor.gates[Lane.STEP]
    gate.close()
    call = stream(client, "GenerationService/GenerateImage", image(), generation_pb2.GenerateImageResponse, form)
    steps = 0
    gate.let(1)
    async with asyncio.timeout(20):
        async for message in call:
            if message.event.HasField("step_progress"):
                steps += 1
                assert message.event.step_progress.step == steps
                gate.let(1)
    assert steps == 3
    gate.open()


async def files(client):
    data = bytes(range(256)) * 12_000
    answer = await client.post("/files/assets", content=data, headers={"content-type": "image/png"})
    assert answer.json()["sizeBytes"] == str(len(data))
