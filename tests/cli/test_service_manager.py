"""What systemd hears of a server: a real socket of sd_notify, and real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_grpc.cli import serve
from omni_grpc.cli.service_manager import ServiceManager
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.fleet import Fleet
from tests.server.fake_executor import FakeExecutor
from tests.server.service import CHECKPOINT, until


class Manager:
    """The side of systemd."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)
        self.heard: list[str] = []

    def listen(self) -> list[str]:
        while True:
            try:
                self.heard += self._socket.recv(4096).decode().split("\n")
            except BlockingIOError:
                return self.heard

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    name = f"omni-{os.getpid()}"
    if request.param == "file":
        listening, told = str(tmp_path / name), str(tmp_path / name)
    else:
        listening, told = f"\0{name}", f"@{name}"
    manager = Manager(listening)
    monkeypatch.setenv("NOTIFY_SOCKET", told)
    yield manager
    manager.close()


def fleet(executor: FakeExecutor) -> Fleet:
    return Fleet.of(Engine(EngineConfig.from_settings(model="toy", port=0, drain_timeout=600), CHECKPOINT, executor))


async def test_it_hears_of_a_server_once_the_model_is_loaded_and_when_it_drains(manager, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    executor = FakeExecutor()
    executor.loading.close()
    serving = asyncio.create_task(serve.serve(fleet(executor)))
    await asyncio.sleep(0.1)
    assert manager.listen() == [], "it loads"
    executor.loading.open()
    await until(lambda: manager.listen().count("WATCHDOG=1") >= 3)
    assert manager.heard[0] == "READY=1"
    assert manager.heard[1].startswith("STATUS=serving 127.0.0.1:")
    assert "STOPPING=1" not in manager.heard
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    assert manager.listen()[-2:] == ["STOPPING=1", "STATUS=draining"]


async def test_a_loop_that_hangs_gives_no_sign_of_life(manager):
    told = ServiceManager(os.environ["NOTIFY_SOCKET"], watchdog=0.02)
    with told.running("serving"):
        await asyncio.sleep(0.05)
        before = manager.listen().count("WATCHDOG=1")
        assert before >= 2
        time.sleep(0.2)  # noqa: ASYNC251 (what the watchdog is there for)
        assert manager.listen().count("WATCHDOG=1") == before


async def test_a_manager_that_is_gone_does_not_end_the_server(tmp_path, caplog):
    with ServiceManager(str(tmp_path / "none")).running("serving"):
        pass
    assert "was not told READY=1" in caplog.text


@pytest.mark.parametrize(
    ("environ", "watchdog"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_the_watchdog_is_the_one_of_this_process(environ, watchdog):
    assert ServiceManager.of(environ)._watchdog == watchdog
