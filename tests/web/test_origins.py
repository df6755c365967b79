"""Which pages may call, and which names this server answers to."""

from __future__ import annotations

import httpx2
import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.types.errors import ConfigError
from tests.server.service import serving

from .tokens import token_file

RPC = "/omni_grpc.v1.ModelService/ListModels"
STUDIO = "https://studio.example"


def client(service, **headers):
    return httpx2.AsyncClient(base_url=service.http, timeout=30, trust_env=False, headers=headers)


async def test_a_page_of_this_port_may_call(service, http):
    answer = await http.post(RPC, json={}, headers={"origin": service.http})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", [RPC, "/files/assets", "/files/x"])
async def test_a_page_of_another_origin_is_refused_before_anything_is_done(http, path):
    answer = await http.post(path, content=b"{}", headers={"origin": STUDIO, "content-type": "text/plain"})
    assert answer.status_code == 403
    assert "--http-origins" in answer.text
    assert "access-control-allow-origin" not in answer.headers


async def test_a_listed_origin_may_call_and_is_told_so():
    async with serving(http_port=0, http_origins=STUDIO) as service, client(service, origin=STUDIO) as http:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        answer = await http.options(RPC, headers=asked)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, STUDIO)
        allowed = answer.headers["access-control-allow-headers"].lower().split(", ")
        assert {"authorization", "traceparent", "tracestate"} <= set(allowed)
        answer = await http.post(RPC, json={})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, STUDIO)
        assert {"grpc-status", "traceparent"} <= set(
            answer.headers["access-control-expose-headers"].lower().split(", ")
        )
        other = await http.post(RPC, json={}, headers={"origin": "https://elsewhere.example"})
        assert other.status_code == 403


async def test_a_star_is_every_origin():
    async with serving(http_port=0, http_origins="*") as service, client(service, origin=STUDIO) as http:
        answer = await http.post(RPC, json={})
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(("host", "status"), [("evil.example", 403), ("localhost:1", 200), ("127.0.0.1", 200)])
async def test_a_name_that_points_here_opens_nothing_where_everybody_may_do_everything(http, host, status):
    answer = await http.post(RPC, json={}, headers={"host": host})
    assert answer.status_code == status


async def test_names_of_this_server_are_answered(tmp_path):
    async with serving(http_port=0, http_url="https://images.example") as service, client(service) as http:
        assert (await http.post(RPC, json={}, headers={"host": "images.example"})).status_code == 200
    file, tokens = token_file(tmp_path, studio=["read"])
    async with serving(http_port=0, token_file=file) as service, client(service) as http:
        named = {"host": "any.example", "authorization": f"Bearer {tokens['studio']}"}
        assert (await http.post(RPC, json={}, headers=named)).status_code == 200


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"http_origins": STUDIO}, "http_origins"),
        ({"http_port": 0, "http_origins": "studio.example"}, "http_origins"),
        ({"http_port": 0, "http_origins": f"{STUDIO}/page"}, "http_origins"),
        ({"http_port": 0, "http_url": "images.example"}, "http_url"),
        ({"http_port": 0, "http_host": "unix:a.sock"}, "http_host"),
        ({"http_port": 0, "http_host": "0.0.0.0"}, "http_host"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, field):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_settings(model="toy", **settings)
    assert [violation.field for violation in caught.value.violations] == [field]
