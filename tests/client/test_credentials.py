"""TLS, client certificates, tokens and Unix sockets, with both clients and a real server."""

from __future__ import annotations

import pytest

from omni_grpc.client import AsyncClient, Client
from omni_grpc.client.credentials import credentials
from omni_grpc.server.guard import Guard
from omni_grpc.types.errors import InvalidArgument, Unavailable
from tests.server.certificates import Authority
from tests.server.service import serving

TOKEN = "omni_" + "a" * 43


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def seen(monkeypatch):
    """(method, authorization) of every call that reaches the server."""
    calls: list[tuple[str, str | None]] = []
    intercept = Guard.intercept_service

    async def recording(self, continuation, details):
        metadata = dict(details.invocation_metadata)
        calls.append((details.method.rpartition("/")[2], metadata.get("authorization")))
        return await intercept(self, continuation, details)

    monkeypatch.setattr(Guard, "intercept_service", recording)
    return calls


@pytest.fixture
def short_path(tmp_path_factory):
    return tmp_path_factory.mktemp("s") / "omni.sock"


async def test_a_client_trusts_the_authority_that_it_is_given(kind, authority, seen):
    async with serving(**authority.server()) as service:
        address = f"127.0.0.1:{service.server.port}"
        async with kind(address, ca=authority.file) as client:
            assert (await client.server_info()).version
        async with kind(address, tls=True) as client:
            with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await client.server_info()
        async with kind(address) as client:
            with pytest.raises(Unavailable):
                await client.server_info()
    assert seen == [("GetServerInfo", None)]


async def test_a_client_presents_its_certificate(kind, authority):
    settings = authority.server(tls_client_ca=authority.file, tls_require_client_cert=True)
    async with serving(**settings) as service:
        address = f"127.0.0.1:{service.server.port}"
        cert, key = authority.issue("client", "gateway.studio")
        async with kind(address, ca=authority.file, cert=cert, key=key) as client:
            assert (await client.server_info()).version
        async with kind(address, ca=authority.file) as client:
            with pytest.raises(Unavailable):
                await client.server_info()


async def test_a_token_goes_with_every_call(kind, authority, seen, tmp_path):
    async with (
        serving(**authority.server()) as service,
        kind(f"127.0.0.1:{service.server.port}", ca=authority.file, token=TOKEN) as client,
    ):
        await client.server_info()
        await client.upload(b"\x89PNG\r\n\x1a\n" + bytes(32), mime_type="image/png")
        result = await client.generate_image("a red circle", width=32, height=16, steps=2)
        await client.download(result.artifacts[0].artifact_id)
        async with client.watch_job(result.job_id) as stream:
            assert [event async for event in stream]
    methods = {method for method, _ in seen}
    assert {"GetServerInfo", "UploadAsset", "GenerateImage", "DownloadArtifact", "WatchJob"} <= methods
    assert {authorization for _, authorization in seen} == {f"Bearer {TOKEN}"}


async def test_a_token_may_change_while_the_client_lives(kind, seen, tmp_path):
    file, current = tmp_path / "token", ["first"]
    file.write_text("one\n")
    async with serving() as service:
        for token in (file, lambda: current[0]):
            async with kind(f"127.0.0.1:{service.server.port}", token=token) as client:
                await client.server_info()
                file.write_text("two\n")
                current[0] = "second"
                await client.server_info()
                file.unlink(missing_ok=True)
                if token is file:
                    with pytest.raises(InvalidArgument, match=r"token file .*No such file"):
                        await client.server_info()
    assert [authorization for _, authorization in seen] == [
        "Bearer one",
        "Bearer two",
        "Bearer second",
        "Bearer second",
    ]


async def test_a_unix_socket_is_an_address_and_takes_tokens(kind, short_path, seen):
    async with serving(host=f"unix:{short_path}"), kind(f"unix:{short_path}", token=TOKEN) as client:
        assert (await client.server_info()).version
    assert seen == [("GetServerInfo", f"Bearer {TOKEN}")]


def test_the_synchronous_client_takes_what_the_other_takes(authority):
    Client("server.example:1", ca=authority.file, token=TOKEN).close()


async def test_a_token_is_not_sent_to_another_machine_in_plain_text(kind):
    with pytest.raises(InvalidArgument, match=r"unencrypted.*ca=FILE.*--insecure") as caught:
        kind("server.example:50051", token=TOKEN)
    assert caught.value.reason == "TOKEN_NEEDS_TLS"
    assert TOKEN not in str(caught.value)
    for address, options in (
        ("server.example:50051", {"insecure": True}),
        ("server.example:50051", {"tls": True}),
        ("localhost:50051", {}),
        ("[::1]:50051", {}),
        ("unix:omni.sock", {}),
    ):
        assert credentials(address, token=TOKEN, **options).token == TOKEN


def spoiled(authority, name: str, data: bytes = b"nothing") -> str:
    return authority.replace(name, data)


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        (lambda a: {"ca": a.folder / "none.pem"}, "ca", "No such file"),
        (lambda a: {"ca": spoiled(a, "ca2.pem")}, "ca", "no certificates in PEM"),
        (lambda a: {"cert": a.issue("c", "x")[0]}, "key", "needs both"),
        (lambda a: {"key": a.issue("c", "x")[1]}, "cert", "needs both"),
        (lambda a: {"cert": a.issue("c", "x")[0], "key": a.issue("d", "x")[1]}, "key", "is not the private key of"),
        (lambda a: {"cert": a.issue("c", "x")[0], "key": spoiled(a, "k")}, "key", "is not the private key of"),
        (lambda a: {"cert": a.folder / "none", "key": a.issue("d", "x")[1]}, "cert", "No such file"),
        (lambda a: {"token": ""}, "token", "empty"),
        (lambda a: {"token": "a b"}, "token", "characters"),
        (lambda a: {"token": "a\nb"}, "token", "characters"),
        (lambda a: {"token": "\u00e9"}, "token", "characters"),
        (lambda a: {"token": a.folder / "none"}, "token", "No such file"),
    ],
)
async def test_credentials_that_cannot_work_are_refused_by_name(kind, authority, options, field, says):
    with pytest.raises(InvalidArgument, match=says) as caught:
        kind("localhost:1", **options(authority))
    assert caught.value.violations[0].field == field


def test_an_encrypted_key_asks_nobody(authority):
    from cryptography.hazmat.primitives import serialization

    cert, key = authority.issue("c", "x")
    with open(key, "rb") as file:
        held = serialization.load_pem_private_key(file.read(), None)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    authority.replace("c.key", held.private_bytes(*form, serialization.BestAvailableEncryption(b"secret")))
    with pytest.raises(InvalidArgument, match="without a passphrase"):
        credentials("localhost:1", cert=cert, key=key)


def test_a_unix_socket_has_no_tls():
    with pytest.raises(InvalidArgument, match="never encrypted"):
        credentials("unix:omni.sock", tls=True)


async def test_no_repr_shows_the_token():
    held = credentials("localhost:1", token=TOKEN)
    async with AsyncClient("localhost:1", token=TOKEN) as client:
        assert TOKEN not in repr(held) + repr(client) + repr(client._connection) + repr(vars(client))
