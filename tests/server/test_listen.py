"""What a server listens on, what is refused, and what it says when it cannot."""

import socket

import pytest

from omni_grpc.client import AsyncClient
from omni_grpc.config.settings import settings
from omni_grpc.types.errors import ConfigError

from .service import serving
from .test_server_life import parts


def load(*argv):
    return settings(argv, {}, prog="serve", description="").server


@pytest.mark.parametrize("port", ["-1", "65536", "70000"])
def test_a_port_out_of_range_is_refused_by_name(port):
    with pytest.raises(ConfigError, match=rf"--port is '{port}': must be from 0 to 65535") as caught:
        load("--port", port)
    assert [violation.field for violation in caught.value.violations] == ["port"]


HOSTS = {
    "": "use localhost",
    "*": "use 0.0.0.0 for all interfaces",
    "[::": r"neither a host name nor an IP address|not an IPv6 address",
    "[gpu1]": r"write gpu1|brackets",
    "gpu1:50051": "has a port; use --host gpu1 --port 50051",
    "[::1]:50051": r"has a port; use --host \[::1\] --port 50051",
    "::g": "::g is not an IPv6 address",
    "256.0.0.1": "256.0.0.1 is not an IPv4 address",
    "http://gpu1": "a URL",
    "unix:": "has no path; write unix:/run/omni-grpc.sock",
    "my host": "'my host' is neither a host name nor an IP address",
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_that_is_none_is_refused_by_name(host):
    with pytest.raises(ConfigError, match=HOSTS[host]) as caught:
        load("--host", host)
    assert [violation.field for violation in caught.value.violations] == ["host"]


@pytest.mark.parametrize("host", ["[::]", "::", "0.0.0.0", "[::1]", "127.0.0.1", "localhost"])
async def test_the_address_that_is_told_can_be_dialed(host):
    async with serving(host=host, insecure=True) as service, AsyncClient(service.server.address) as client:
        assert service.server.port > 0
        assert service.server.address.endswith(f":{service.server.port}")
        assert (await client.server_info()).version


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::]"])
async def test_a_port_in_use_is_refused_on_every_address_of_the_host(host):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        _, server, _ = parts(host=host, insecure=True, port=other.getsockname()[1])
        with pytest.raises(
            ConfigError, match=r"the port is in use by another program.*choose another --port"
        ) as caught:
            await server.start()
    assert (caught.value.reason, caught.value.violations[0].field) == ("CANNOT_LISTEN", "port")


async def test_a_host_that_nothing_resolves_or_that_is_elsewhere_is_told_with_the_fix():
    for host, why in {
        "no-such-host.invalid": r"no-such-host.invalid:0: the name cannot be resolved .*as --host",
        "192.0.2.1": r"192.0.2.1:0: no interface of this machine has that address; .*0\.0\.0\.0",
    }.items():
        _, server, _ = parts(host=host, insecure=True)
        with pytest.raises(ConfigError, match=why) as caught:
            await server.start()
        assert caught.value.violations[0].field == "host"
