"""`omni-grpc health`: an exit code for probes, of real servers."""

from __future__ import annotations

import asyncio

import pytest

from omni_grpc.engine import EngineState
from omni_grpc.engine.scheduler import Lane
from tests.server.certificates import Authority
from tests.server.service import serving, until


async def test_a_server_that_takes_jobs_is_healthy(run, server):
    for service in ((), ("--service", "liveness"), ("--service", "model:toy")):
        ran = await run("health", *server, *service)
        assert (ran.code, ran.out, ran.err) == (0, "SERVING\n", "")


async def test_one_that_drains_is_alive_and_not_ready(run, service, server):
    service.executor.gates[Lane.STEP].close()
    await service.create()
    closing = asyncio.create_task(service.engine.close(600))
    await until(lambda: service.engine.state is EngineState.DRAINING)
    ran = await run("health", *server)
    assert (ran.code, ran.out) == (1, "")
    assert "NOT_SERVING" in ran.err
    assert (await run("health", *server, "--service", "liveness")).code == 0
    service.executor.gates[Lane.STEP].open()
    await closing


async def test_none_and_an_unknown_service_are_unhealthy(run, server):
    ran = await run("health", *server, "--service", "model:other")
    assert ran.code == 1
    assert "'model:other'" in ran.err
    ran = await run("health", "--server", "127.0.0.1:1", "--timeout", "1")
    assert ran.code == 1
    assert "SERVER_UNREACHABLE" in ran.err


@pytest.mark.parametrize("name", ["", "omni.example"])
async def test_tls_may_be_for_another_name_than_localhost(run, tmp_path, name):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server", "omni.example")
    async with serving(tls_cert=certificate, tls_key=key) as service:
        address = ("--server", f"127.0.0.1:{service.server.port}", "--ca", authority.file, "--timeout", "2")
        ran = await run("health", *address, *(("--tls-name", name) if name else ()))
        assert ran.code == (0 if name else 1), ran.err


async def test_a_name_without_tls_is_refused(run, server):
    ran = await run("health", *server, "--tls-name", "omni.example")
    assert ran.code == 1
    assert "--tls-name has no effect" in ran.err
