"""How the commands connect: flags, variables, and what they refuse."""

from __future__ import annotations

import pytest
import pytest_asyncio

from omni_grpc.server.guard import Guard
from tests.server.certificates import Authority
from tests.server.service import serving

TOKEN = "omni_" + "a" * 43


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def tokens(monkeypatch):
    """The authorization of every call that reaches the server."""
    found: list[str | None] = []
    intercept = Guard.intercept_service

    async def recording(self, continuation, details):
        found.append(dict(details.invocation_metadata).get("authorization"))
        return await intercept(self, continuation, details)

    monkeypatch.setattr(Guard, "intercept_service", recording)
    return found


@pytest_asyncio.fixture
async def secured(authority):
    """The address of a server with TLS and mTLS, and the flags that get in."""
    settings = authority.server(tls_client_ca=authority.file, tls_require_client_cert=True)
    cert, key = authority.issue("client", "gateway.studio")
    async with serving(**settings) as service:
        yield f"127.0.0.1:{service.server.port}", ("--ca", authority.file, "--cert", cert, "--key", key)


async def test_every_command_takes_certificates_and_a_token(run, secured, tokens, tmp_path):
    server, flags = secured
    assert (await run("models", "--server", server, *flags, "--token", TOKEN)).code == 0
    for command in (
        ("jobs",),
        ("wait",),
        ("generate", "a red circle", "--out", tmp_path / "out.png", "--width", 32, "--height", 16, "--quiet"),
    ):
        ran = await run(*command, "--server", server, *flags, "--token", TOKEN)
        assert ran.code == 0, ran.err
    assert set(tokens) == {f"Bearer {TOKEN}"}
    for command in (("watch", "x"), ("cancel", "x"), ("download", "x", "--out", tmp_path / "x")):
        assert "JOB_NOT_FOUND" in (ran := await run(*command, "--server", server, *flags)).err or "ARTIFACT" in ran.err


async def test_server_and_token_come_from_the_environment(run, service, tokens, monkeypatch, tmp_path):
    monkeypatch.setenv("OMNI_GRPC_SERVER", f"127.0.0.1:{service.server.port}")
    monkeypatch.setenv("OMNI_GRPC_TOKEN", TOKEN)
    assert (await run("jobs")).code == 0
    out = tmp_path / "out.png"
    assert (await run("generate", "x", "--out", out, "--width", 32, "--height", 16, "--quiet")).code == 0
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert (await run("jobs", "--token-file", file)).code == 0
    assert (await run("jobs", "--token", "from-flag")).code == 0
    assert tokens[0] == f"Bearer {TOKEN}"
    assert tokens[-2:] == ["Bearer from-file", "Bearer from-flag"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("jobs", "--token", "a", "--token-file", "b"), 2, "not allowed with"),
        (("jobs", "--server", "server.example:1", "--token", "a"), 1, "TOKEN_NEEDS_TLS"),
        (("jobs", "--cert", "c.pem"), 1, "needs both"),
        (("models", "--ca", "ca.pem"), 1, "--ca has no effect without --server"),
        (("models", "--token-file", "t"), 1, "--token-file has no effect without --server"),
        (("generate", "x", "--out", "x.png", "--model", ".", "--token-file", "t"), 2, "--token-file has no effect"),
        (("generate", "x", "--out", "x.png", "--model", ".", "--insecure"), 2, "--insecure has no effect"),
    ],
)
async def test_flags_that_cannot_work_are_refused(run, arguments, code, says):
    ran = await run(*arguments)
    assert ran.code == code
    assert says in ran.err
    assert "Traceback" not in ran.err


async def test_tokens_are_managed_by_the_command_line(run, tmp_path):
    ran = await run("token", "new", "--tenant", "t", "--subject", "s", "--scopes", "read", "--file", tmp_path / "f")
    assert ran.code == 0
    assert ran.out.startswith("omni_")
    assert "token" in (await run("--help")).out
