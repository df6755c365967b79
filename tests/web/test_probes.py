"""/healthz and /readyz of the HTTP port say what grpc.health.v1 says."""

import httpx2
import pytest

from omni_grpc.engine import EngineState
from omni_grpc.v1 import admin_pb2
from tests.server.service import downloading, serving, starting, until
from tests.server.test_audit import audited


async def asked(service, path: str) -> tuple[int, dict]:
    async with httpx2.AsyncClient(base_url=service.http) as client:
        found = await client.get(path)
    assert found.headers["cache-control"] == "no-store"
    return found.status_code, found.json()


async def test_a_model_that_loads_is_alive_and_tells_how_far_it_is():
    async with starting(http_port=0) as (service, start):
        service.executor._deliver(downloading(250))
        told = {
            "status": "loading",
            "phase": "downloading vae, 250 bytes of 1 kB",
            "done_bytes": 250,
            "total_bytes": 1000,
        }
        assert await asked(service, "/healthz") == (200, {"status": "alive"})
        assert await asked(service, "/readyz") == (503, {"status": "starting", "models": {"toy": told}})
        assert await asked(service, "/readyz?model=toy") == (503, {"model": "toy", **told})
        info = await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
        (loading,) = info.loading
        assert (loading.model, loading.phase) == ("toy", admin_pb2.LOAD_PHASE_DOWNLOADING)
        assert (loading.component, loading.done_bytes, loading.total_bytes) == ("vae", 250, 1000)
        service.executor.loading.open()
        await start
        assert await asked(service, "/readyz") == (200, {"status": "ready", "models": {"toy": {"status": "ready"}}})
        assert await asked(service, "/readyz?model=toy") == (200, {"model": "toy", "status": "ready"})
        assert not (await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())).loading


async def test_a_worker_that_is_replaced_is_not_ready_and_a_draining_server_neither():
    async with serving(http_port=0) as service:
        service.executor.loading.close()
        await service.executor.die()
        await until(lambda: service.engine.state is EngineState.RESTARTING)
        assert (await asked(service, "/readyz"))[0] == 503
        assert (await asked(service, "/healthz"))[0] == 200
        service.executor.loading.open()
        await until(lambda: service.engine.state is EngineState.READY)
        await service.admin.Drain(admin_pb2.DrainRequest())
        await until(lambda: service.engine.state is not EngineState.READY)
        status, body = await asked(service, "/readyz")
        assert (status, body["status"]) == (503, service.engine.state.lower())
        assert (await asked(service, "/healthz"))[0] == 200


async def test_a_model_that_is_not_there_is_none():
    async with serving(http_port=0) as service:
        assert await asked(service, "/readyz?model=other") == (404, {"status": "unknown", "model": "other"})


@pytest.mark.service
async def test_where_callers_say_who_they_are_names_of_models_are_not_told(tmp_path):
    async with audited(tmp_path, http_port=0) as service:
        assert await asked(service, "/readyz") == (200, {"status": "ready"})
