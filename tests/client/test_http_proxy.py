"""gRPC takes an HTTP proxy from the environment. Channels to this machine are opened without it; where a proxy stands
in the way of another, the error says which variable it is.
"""

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_grpc.cli.main import main
from omni_grpc.client import AsyncClient
from omni_grpc.client.address import proxy_note
from omni_grpc.types.errors import Unavailable

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "grpc_proxy", "all_proxy", "ALL_PROXY")
NOBODY = "http://user:secret@127.0.0.1:9"
"""A proxy that refuses every connection."""


@pytest.fixture(autouse=True)
def without_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


async def test_calls_to_this_machine_go_past_every_proxy(service, kind, monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, NOBODY)
    for host in ("127.0.0.1", "localhost"):
        async with kind(f"{host}:{service.server.port}") as client:
            assert (await client.server_info()).version


async def test_the_command_line_goes_past_them_too(service, monkeypatch, capsys):
    for name in VARIABLES:
        monkeypatch.setenv(name, NOBODY)
    assert await asyncio.to_thread(main, ["models", "--server", f"localhost:{service.server.port}"]) == 0
    assert "toy" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_an_error_of_a_call_through_a_proxy_names_the_variable(name, monkeypatch):
    monkeypatch.setenv(name, NOBODY)
    async with AsyncClient("gpu1.invalid:50051") as client:
        with pytest.raises(Unavailable) as caught:
            await client.server_info()
    assert f"the proxy 127.0.0.1:9 of the environment variable {name}" in str(caught.value)
    assert "add gpu1.invalid to no_proxy or unset" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_gRPC_does_not_read_or_leaves_out_is_not_named():
    proxied = {"https_proxy": NOBODY}
    assert "https_proxy" in proxy_note("gpu1:1", proxied)
    assert proxy_note("gpu1:1", {"HTTPS_PROXY": NOBODY, "all_proxy": NOBODY}) == ""
    assert proxy_note("gpu1:1", {"http_proxy": ""}) == ""
    assert proxy_note("gpu1:1", {"http_proxy": "socks5://127.0.0.1:9"}) == ""
    assert proxy_note("localhost:1", proxied) == ""
    assert proxy_note("unix:/run/x", proxied) == ""
    assert proxy_note("gpu1.example.com:1", proxied | {"no_proxy": "a, .EXAMPLE.com"}) == ""
    assert proxy_note("10.1.2.3:1", proxied | {"no_proxy": "10.0.0.0/8"}) == ""
    assert proxy_note("gpu1:1", proxied | {"no_proxy": "gpu1", "no_grpc_proxy": "other"}) != ""


async def test_a_server_that_is_not_there_is_not_blamed_on_a_proxy_that_is_left_out(monkeypatch):
    monkeypatch.setenv("http_proxy", NOBODY)
    async with AsyncClient("127.0.0.1:9") as client:
        with pytest.raises(Unavailable) as caught:
            await client.server_info()
    assert "proxy" not in str(caught.value)


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="insecure_channel" | "secure_channel")):
                yield node


def test_every_channel_of_the_project_chooses_its_options():
    found = 0
    for folder in ("omni_grpc", "tests", "tools", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for call in calls(ast.parse(path.read_text(encoding="utf-8"))):
                options = [ast.unparse(word.value) for word in call.keywords if word.arg == "options"]
                assert options, f"{path}:{call.lineno} may go through a proxy: pass options_for(address)"
                found += 1
    assert found > 8
