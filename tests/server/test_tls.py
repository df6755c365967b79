"""Real certificates, a real server, real clients."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import socket
import ssl
import stat
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni_grpc.client.channel import options_for
from omni_grpc.config import TlsConfig
from omni_grpc.engine.scheduler import Lane
from omni_grpc.engine.status import EngineState
from omni_grpc.identity import certificates
from omni_grpc.server.tls import client_certificate, server_credentials
from omni_grpc.types.errors import ConfigError
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc

from .certificates import Authority
from .service import image, kinds, serving

OWN_POOL = (("grpc.use_local_subchannel_pool", 1),)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@contextlib.asynccontextmanager
async def connected(service, *, ca: str, cert: tuple[str, str] | None = None):
    credentials = grpc.ssl_channel_credentials(*read(ca, *reversed(cert or ())))
    async with aio.secure_channel(f"127.0.0.1:{service.server.port}", credentials, options=OWN_POOL) as channel:
        yield channel


def read(*paths: object) -> list[bytes]:
    return [Path(str(path)).read_bytes() for path in paths]


async def info(channel) -> admin_pb2.GetServerInfoResponse:
    return await admin_pb2_grpc.AdminServiceStub(channel).GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=10)


async def unreachable(channel) -> str:
    with pytest.raises(aio.AioRpcError) as caught:
        await info(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details()


def presented(port: int, *versions: ssl.TLSVersion) -> tuple[str, x509.Certificate]:
    """The version of TLS that a client gets, and the server's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if versions:
        context.set_ciphers("ALL:@SECLEVEL=0")  # without which OpenSSL itself offers nothing below 1.2
        context.minimum_version = context.maximum_version = versions[0]
    with (
        socket.create_connection(("127.0.0.1", port), 10) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as tls,
    ):
        return str(tls.version()), x509.load_der_x509_certificate(tls.getpeercert(binary_form=True))


async def test_calls_are_encrypted_and_plain_ones_refused(authority):
    async with serving(**authority.server()) as service:
        async with connected(service, ca=authority.file) as channel:
            assert (await info(channel)).version
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        await unreachable(service.channel)
        stranger = Authority(authority.folder / "..").ca
        other = grpc.ssl_channel_credentials(stranger.cert_pem.bytes())
        async with aio.secure_channel(f"127.0.0.1:{service.server.port}", other, options=OWN_POOL) as channel:
            assert "CERTIFICATE_VERIFY_FAILED" in await unreachable(channel)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
@pytest.mark.parametrize("version", ["TLSv1", "TLSv1_1", "TLSv1_2", "TLSv1_3"])
async def test_tls_begins_at_1_2(authority, version):
    async with serving(**authority.server()) as service:
        ask = asyncio.to_thread(presented, service.server.port, ssl.TLSVersion[version])
        if version in ("TLSv1", "TLSv1_1"):
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                await ask
        else:
            assert (await ask)[0] == version.replace("_", ".")


async def test_a_new_certificate_is_served_while_a_stream_goes_on(authority):
    async with serving(**authority.server()) as service, connected(service, ca=authority.file) as channel:
        _, before = await asyncio.to_thread(presented, service.server.port)
        service.executor.gates[Lane.STEP].close()
        call = aiter(generation_pb2_grpc.GenerationServiceStub(channel).GenerateImage(image()))
        events = [(await anext(call)).event]
        authority.server()
        _, after = await asyncio.to_thread(presented, service.server.port)
        assert after.serial_number != before.serial_number
        async with connected(service, ca=authority.file) as newer:
            assert (await info(newer)).version
        service.executor.gates[Lane.STEP].open()
        events += [message.event async for message in call]
        assert kinds(events)[-1] == "completed"


def break_key(authority, cert: Path, key: Path) -> None:
    authority.issue("other", "localhost")
    os.replace(authority.folder / "other.key", key)


def cut_certificate(authority, cert: Path, key: Path) -> None:
    cert.write_bytes(cert.read_bytes()[:200])


def remove_key(authority, cert: Path, key: Path) -> None:
    key.unlink()


def expire(authority, cert: Path, key: Path) -> None:
    authority.issue("server", "localhost", until=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))


def encrypt_key(authority, cert: Path, key: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    held = serialization.load_pem_private_key(key.read_bytes(), None)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key.write_bytes(held.private_bytes(*form, serialization.BestAvailableEncryption(b"secret")))


def no_key(authority, cert: Path, key: Path) -> None:
    key.write_bytes(cert.read_bytes())


BROKEN = {
    break_key: ("tls_key", "is not the key of --tls-cert"),
    cut_certificate: ("tls_cert", "has no certificates in PEM"),
    remove_key: ("tls_key", "No such file"),
    expire: ("tls_cert", "expired at 2020-01-01"),
    encrypt_key: ("tls_key", "is encrypted"),
    no_key: ("tls_key", "has no private key in PEM"),
}


@pytest.mark.parametrize("spoil", BROKEN, ids=lambda spoil: spoil.__name__)
async def test_a_broken_certificate_is_refused_at_the_start_and_passed_over_later(authority, spoil, caplog):
    field, says = BROKEN[spoil]
    settings = authority.server()
    async with serving(**settings) as service:
        _, before = await asyncio.to_thread(presented, service.server.port)
        spoil(authority, Path(str(settings["tls_cert"])), Path(str(settings["tls_key"])))
        _, after = await asyncio.to_thread(presented, service.server.port)
        assert after.serial_number == before.serial_number
        assert says in caplog.text
        with pytest.raises(ConfigError, match=says) as caught:
            server_credentials(TlsConfig(**settings))
        assert (caught.value.reason, caught.value.violations[0].field) == ("BAD_CERTIFICATE", field)
        authority.server()
        _, renewed = await asyncio.to_thread(presented, service.server.port)
        assert renewed.serial_number != before.serial_number


async def test_a_server_with_a_broken_certificate_does_not_start(authority):
    settings = authority.server()
    os.unlink(settings["tls_key"])
    with pytest.raises(ConfigError, match=r"--tls-key .*No such file"):
        async with serving(**settings):
            pass


async def test_a_key_that_everybody_may_read_is_told(authority, caplog):
    settings = authority.server()
    os.chmod(settings["tls_key"], 0o644)
    server_credentials(TlsConfig(**settings))
    assert "chmod o-r" in caplog.text
    assert "PRIVATE KEY" not in caplog.text


# --- mTLS -------------------------------------------------------------------------------------------------------------


def mutual(authority, **settings):
    return authority.server(tls_client_ca=authority.file, tls_require_client_cert=True, **settings)


async def test_a_client_without_a_certificate_of_the_authority_does_not_get_in(authority, tmp_path):
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    async with serving(**mutual(authority)) as service:
        async with connected(service, ca=authority.file) as channel:
            await unreachable(channel)
        cert = Authority(stranger).issue("client", "gateway.studio")
        async with connected(service, ca=authority.file, cert=cert) as channel:
            await unreachable(channel)
        cert = authority.issue("client", "gateway.studio")
        async with connected(service, ca=authority.file, cert=cert) as channel:
            assert (await info(channel)).version


async def test_a_new_authority_of_clients_is_taken(authority, tmp_path):
    folder = tmp_path / "next"
    folder.mkdir()
    successor = Authority(folder)
    cert = successor.issue("client", "gateway.studio")
    async with serving(**mutual(authority)) as service:
        async with connected(service, ca=authority.file, cert=cert) as channel:
            await unreachable(channel)
        authority.replace("ca.pem", authority.ca.cert_pem.bytes() + successor.ca.cert_pem.bytes())
        ca = authority.replace("server-ca.pem", authority.ca.cert_pem.bytes())
        async with connected(service, ca=ca, cert=cert) as channel:
            assert (await info(channel)).version


async def test_a_handler_gets_the_certificate_of_the_client(authority):
    """As the identity room takes it."""
    seen: list[str | None] = []

    async def handle(request: bytes, context: aio.ServicerContext) -> bytes:
        seen.append(client_certificate(context))
        return b""

    for config in (TlsConfig(**mutual(authority)), TlsConfig()):
        server = aio.server()
        method = grpc.unary_unary_rpc_method_handler(handle)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Call": method}),))
        credentials = server_credentials(config)
        address = "localhost:0"
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        await server.start()
        ca, cert, key = read(authority.file, *authority.issue("client", "gateway.studio"))
        target, own = f"localhost:{port}", grpc.ssl_channel_credentials(ca, key, cert)
        ssl_channel = aio.secure_channel(target, own, options=options_for(target))
        async with ssl_channel if credentials else aio.insecure_channel(target, options=options_for(target)) as channel:
            await channel.unary_unary("/test.Test/Call")(b"", timeout=10)
        await ssl_channel.close()
        await server.stop(None)
    pem, nothing = seen
    assert certificates.names(pem)[0] == "DNS:gateway.studio"
    assert nothing is None


# --- Unix sockets -----------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path_factory):
    """A short one: the operating system takes 107 bytes."""
    return tmp_path_factory.mktemp("s") / "omni.sock"


async def test_a_unix_socket_is_an_address(path, authority):
    async with serving(host=f"unix:{path}", **authority.server()) as service:
        assert (service.server.port, service.server.address) == (0, f"unix:{path}")
        assert stat.S_ISSOCK(path.stat().st_mode)
        async with aio.insecure_channel(f"unix:{path}", options=options_for(f"unix:{path}")) as channel:
            assert (await info(channel)).version


async def test_a_unix_socket_in_use_is_not_taken_away(path):
    async with serving(host=f"unix:{path}") as service:
        with pytest.raises(
            ConfigError,
            match=r"cannot listen on unix:.*another server uses that socket",
        ):
            async with serving(host=f"unix:{path}"):
                pass
        async with aio.insecure_channel(f"unix:{path}", options=options_for(f"unix:{path}")) as channel:
            assert (await info(channel)).version
        assert service.engine.state is EngineState.READY


async def test_a_unix_socket_that_was_left_over_is_used_again(path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    address = f"unix:{path}"
    async with serving(host=address), aio.insecure_channel(address, options=options_for(address)) as channel:
        assert (await info(channel)).version


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.with_name("x" * 120), "too long"),
        (lambda path: path.parent / "none" / "omni.sock", "No such file"),
        (lambda path: path.parent, "a file that is no socket"),
    ],
)
async def test_a_path_that_cannot_be_a_socket_is_refused_with_the_reason(path, make, why):
    with pytest.raises(ConfigError, match=f"cannot listen on unix:.*{why}"):
        async with serving(host=f"unix:{make(path)}"):
            pass


async def test_plain_text_on_an_open_address_is_told(caplog):
    caplog.set_level(logging.WARNING)
    async with serving(host="0.0.0.0", insecure=True):
        assert "without TLS (--insecure)" in caplog.text
    caplog.clear()
    async with serving():
        assert "without TLS" not in caplog.text
