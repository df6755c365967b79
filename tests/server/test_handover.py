"""One server takes over from another one while clients call: no call is refused, and none is lost. Both are in this
process here; with processes of their own: test_handover_processes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.engine.scheduler import Lane
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.server import Server
from omni_grpc.store.open import open_storage
from omni_grpc.types.errors import ConfigError
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from omni_grpc.web.port import HttpPort

from .callers import Seen, calling, probing
from .fake_executor import FakeExecutor
from .service import CHECKPOINT, Service, image, kinds, until

CALLS = 200
"""Generate calls that have to go through, at least."""


class Life(Service):
    """A server that has been made, and may be started."""

    @classmethod
    def of(cls, **settings: Any) -> Life:
        config = EngineConfig.from_settings(
            **({"model": "toy", "port": 0, "restart_backoff": 0, "handover_seconds": 1, "drain_timeout": 30} | settings)
        )
        executor, ports = FakeExecutor(), list[HttpPort]()

        def http(backend: Any) -> HttpPort:
            ports.append(HttpPort(backend))
            return ports[0]

        engine = Engine(config, CHECKPOINT, executor, open_storage(config))
        server = Server(Gate(fleet := Fleet.of(engine)), config, beside=[http] if config.http.on else ())
        return cls(engine, server, executor, fleet, *ports)

    async def start(self) -> None:
        await self.server.start()
        self.connect()

    async def leave(self) -> None:
        """What `serve` does when another server has come."""
        await self.server.succeeded()
        await self.server.retire()
        await self.stop()

    async def stop(self) -> None:
        await self.channel.close()
        await self.server.stop(30)


def _read(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=60) as answer:
        data: bytes = answer.read()
    return data


@contextlib.asynccontextmanager
async def clients(life: Life, seen: Seen, *, http: bool = False) -> AsyncIterator[None]:
    async def call(channel: aio.Channel) -> None:
        made = generation_pb2_grpc.GenerationServiceStub(channel).GenerateImage(image(sampling={"steps": 1}))
        seen.ends[str(kinds([message.event async for message in made])[-1])] += 1
        info = await admin_pb2_grpc.AdminServiceStub(channel).GetServerInfo(admin_pb2.GetServerInfoRequest())
        seen.servers[info.instance_id] += 1

    address = f"127.0.0.1:{life.server.port}"
    tasks = [asyncio.create_task(calling(address, seen, call, anew=bool(number % 2))) for number in range(4)]
    if http:
        tasks.append(asyncio.create_task(probing(life.http, seen)))
    try:
        yield
        async with asyncio.timeout(60):
            while seen.ends["completed"] < CALLS:  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.02)
    finally:
        seen.over = True
        await asyncio.gather(*tasks)


async def test_no_call_is_refused_or_lost_while_one_server_takes_over_from_another(tmp_path: Path) -> None:
    seen, settings = Seen(), {"handover": str(tmp_path / "next.sock"), "http_port": 0, "metrics_port": 0}
    first, second = Life.of(**settings), Life.of(**settings)
    await first.start()
    leaving = asyncio.create_task(first.leave())
    async with clients(first, seen, http=True):
        await asyncio.sleep(0.3)
        second.executor.loading.close()
        starting = asyncio.create_task(second.start())
        await until(lambda: second.executor.starts == 1)
        assert not leaving.done(), "the first one serves while the next one loads"
        second.executor.loading.open()
        await starting
        await asyncio.wait_for(leaving, 30)
        assert (second.server.port, second.http) == (first.server.port, first.http)
        old, new = (life.server._metrics_port for life in (first, second))
        assert old is not None
        assert new is not None
        assert new.address == old.address
        assert await asyncio.to_thread(_read, f"{new.address}/metrics")
        before = seen.ends["completed"]
        await until(lambda: seen.ends["completed"] > before + 20)
    assert seen.errors == []
    assert seen.ends.keys() == {"completed", "http 200"}
    assert seen.servers.keys() == {life.engine.storage.instance_id for life in (first, second)}
    await second.stop()
    assert not (tmp_path / "next.sock").exists()


async def test_with_a_folder_calls_wait_until_the_server_before_has_gone_and_its_jobs_go_on(tmp_path: Path) -> None:
    seen = Seen()
    settings = {"handover": str(tmp_path / "next.sock"), "state_dir": str(tmp_path / "kept"), "max_num_seqs": 1}
    first, second = Life.of(**settings), Life.of(**settings)
    await first.start()
    leaving = asyncio.create_task(first.leave())
    first.executor.gates[Lane.STEP].close()
    runs, waits = await first.create(sampling={"steps": 1}), await first.create()
    starting = asyncio.create_task(second.start())
    await until(lambda: not second.server._calls._admitting.is_set())
    async with clients(first, seen):
        await until(lambda: first.engine.ending)
        assert second.executor.starts == 0, "it has no place before the other one has gone"
        first.executor.gates[Lane.STEP].open()
        await asyncio.wait_for(leaving, 30)
        await starting
    assert seen.errors == []
    assert seen.ends.keys() == {"completed"}
    assert kinds(await second.watch(runs.job_id))[-1] == "completed"
    assert kinds(await second.watch(waits.job_id))[-1] == "completed"
    await second.stop()


async def test_a_server_that_cannot_come_leaves_the_other_one_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "next.sock"
    first = Life.of(handover=str(path))
    await first.start()
    elsewhere = Life.of(handover=str(path), host="127.0.0.2")
    with pytest.raises(ConfigError, match="give both the same --host") as caught:
        await elsewhere.server.start()
    assert caught.value.reason == "HANDOVER_REFUSED"
    broken = Life.of(handover=str(path))
    broken.executor.loading.close()
    starting = asyncio.create_task(broken.server.start())
    await until(lambda: broken.executor.starts == 1)
    third = Life.of(handover=str(path))
    with pytest.raises(ConfigError, match="another server is taking over already"):
        await third.server.start()
    await broken.executor.die()
    with pytest.raises(Exception, match="SIGKILL"):
        await starting
    assert not first.server._offering.left.is_set()
    assert (await first.finished()).step == 3
    assert path.stat().st_mode & 0o777 == 0o600
    second = Life.of(handover=str(path))
    await second.start()
    await asyncio.wait_for(first.leave(), 30)
    assert (await second.finished()).step == 3
    await second.stop()


async def test_without_the_agreement_of_the_first_its_address_stays_taken(tmp_path: Path) -> None:
    first = Life.of(handover=str(tmp_path / "next.sock"))
    await first.start()
    for handover in (None, str(tmp_path / "other.sock")):
        other = Life.of(port=first.server.port, handover=handover)
        with pytest.raises(ConfigError) as caught:
            await other.server.start()
        assert caught.value.reason == "CANNOT_LISTEN"
    await first.stop()


@pytest.mark.parametrize("address", [{"host": "unix:a.sock"}, {"admin_address": "unix:a.sock"}])
def test_a_unix_socket_cannot_be_handed_over(address: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_settings(model="toy", handover="next.sock", **address)
    assert [violation.field for violation in caught.value.violations] == list(address)
