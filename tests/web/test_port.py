"""The port: TLS with reload and client certificates, addresses that are taken, tokens, and what `serve` says."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl

import httpx2
import pytest

from benchmarks.service.server import served
from omni_grpc.config.sections import BUNDLED
from omni_grpc.types.errors import ConfigError
from omni_grpc.web.port import _Protocol
from tests.server.certificates import Authority
from tests.server.service import serving

from .calling import refused
from .tokens import token_file

RPC = "/omni_grpc.v1.AdminService/GetServerInfo"
pytestmark = pytest.mark.service


def client(service, verify=True, **headers):
    return httpx2.AsyncClient(base_url=service.http, timeout=30, trust_env=False, verify=verify, headers=headers)


def trusting(authority, *cert):
    context = ssl.create_default_context(cafile=authority.file)
    if cert:
        context.load_cert_chain(*cert)
    return context


async def test_a_call_without_a_token_is_refused_as_over_grpc(tmp_path):
    file, tokens = token_file(tmp_path, studio=["read"])
    async with serving(http_port=0, token_file=file) as service, client(service) as http:
        for headers, reason in (({}, "TOKEN_MISSING"), ({"authorization": "Bearer x"}, "TOKEN_INVALID")):
            answer = await http.post(RPC, json={}, headers=headers)
            assert (answer.status_code, refused(answer.json()).reason) == (401, reason)
        answer = await http.post(RPC, json={}, headers={"authorization": f"Bearer {tokens['studio']}"})
        assert answer.status_code == 200


async def test_tls_and_a_new_certificate_without_a_restart(tmp_path):
    authority = Authority(tmp_path)
    async with serving(http_port=0, **authority.server()) as service:
        assert service.http.startswith("https://")
        async with client(service, trusting(authority)) as http:
            assert (await http.post(RPC, json={})).status_code == 200
        before = await presented(service)
        authority.server()
        assert await presented(service) != before
        async with client(service, trusting(authority)) as http:
            assert (await http.post(RPC, json={})).status_code == 200


async def presented(service):
    """The server's certificate, as a new connection gets it."""
    host, port = service.http.removeprefix("https://").split(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=10)


async def test_a_client_certificate_says_who_calls(tmp_path):
    authority = Authority(tmp_path)
    settings = authority.server(tls_client_ca=authority.file, tls_require_client_cert=True)
    identities = tmp_path / "identities.yaml"
    identities.write_text('- {name: gateway, tenant: studio, scopes: [read], certificate: "DNS:gateway.studio"}\n')
    identities.chmod(0o600)
    async with serving(http_port=0, token_file=str(identities), **settings) as service:
        mine = authority.issue("client", "gateway.studio")
        async with client(service, trusting(authority, *mine)) as http:
            answer = await http.post(RPC, json={})
            assert answer.status_code == 200, answer.text
        stranger = authority.issue("stranger", "somebody.else")
        async with client(service, trusting(authority, *stranger)) as http:
            assert (await http.post(RPC, json={})).status_code == 401
        async with client(service, trusting(authority)) as http:
            with pytest.raises(httpx2.TransportError):
                await http.post(RPC, json={})


async def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            async with serving(http_port=port):
                pass
    assert caught.value.reason == "CANNOT_LISTEN"
    assert [violation.field for violation in caught.value.violations] == ["http_port"]
    assert "--http-port" in str(caught.value)


async def test_small_answers_leave_at_once(monkeypatch):
    """Without TCP_NODELAY, the end of each answer waits 40 ms for the client's acknowledgment."""
    seen = []
    made = _Protocol.connection_made

    def connection_made(self, transport):
        seen.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(_Protocol, "connection_made", connection_made)
    async with serving(http_port=0) as service, client(service) as http:
        assert (await http.post(RPC, json={})).status_code == 200
    assert seen
    assert all(seen)


def test_serve_listens_on_both_ports_and_stops():
    with served(BUNDLED, "--http-port", "0", "--warm-up-seconds", "0", "--device", "cpu") as server:
        (address,) = re.findall(r"HTTP listens on (\S+)", server.logged())
        answer = httpx2.post(address + RPC, json={}, trust_env=False)
        assert answer.json()["version"]
        assert "Traceback" not in server.logged()
