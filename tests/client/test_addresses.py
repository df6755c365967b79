"""Addresses of a server: which are dialed as they are, and what is said of the others."""

import pytest

from omni_grpc.client.address import check_address, is_local
from omni_grpc.types.address import dialed, listen_host
from omni_grpc.types.errors import InvalidArgument

TAKEN = {
    "localhost:1": True,
    "LOCALHOST:1": True,
    "a.localhost:50051": True,
    "127.0.0.1:65535": True,
    "127.8.9.10:1": True,
    "0.0.0.0:1": True,
    "[::1]:50051": True,
    "[::]:50051": True,
    "[::ffff:127.0.0.1]:1": True,
    "unix:/run/x.sock": True,
    "unix:///run/x.sock": True,
    "unix-abstract:name": True,
    "ipv4:127.0.0.1:1": True,
    "ipv6:[::1]:1": True,
    "dns:///localhost:1": True,
    "gpu1:50051": False,
    "gpu_1.example.com.:50051": False,
    "localhost.example.com:1": False,
    "10.0.0.1:1": False,
    "[2001:db8::1]:1": False,
    "[fe80::1%eth0]:1": False,
    "dns://8.8.8.8/gpu1:1": False,
    "ipv4:127.0.0.1:1,10.0.0.1:1": False,
    "xds:///gpus": False,
}
"""Address -> whether it is on this machine."""

REFUSED = {
    "localhost": "has no port; write localhost:50051",
    "": "has no port; write localhost:50051",
    "::1": "is an IPv6 address without a port; write [::1]:50051",
    "[::1]": "has no port; write [::1]:50051",
    "::1:50051": "is an IPv6 address without brackets; write [::1]:50051",
    "2001:db8::17:50051": "is an IPv6 address without brackets; write [2001:db8::17]:50051",
    ":::50051": "is an IPv6 address without brackets; write [::]:50051",
    "a:b:c": "is not HOST:PORT",
    ":50051": "has no host; write localhost:50051",
    "localhost:": "has the port ''; a port is a number from 1 to 65535",
    "localhost:0": "has the port '0'",
    "localhost:70000": "has the port '70000'; a port is a number from 1 to 65535",
    "localhost:-1": "has the port '-1'",
    "localhost:grpc": "has the port 'grpc'",
    "localhost:50051/": "has the port '50051/'",
    "http://gpu1:8000": "is a URL; write gpu1:8000",
    "https://gpu1/": "is a URL; write gpu1:50051",
    "grpc://[::1]": "is a URL; write [::1]:50051",
    " localhost:1": "has blanks around it",
    "my host:1": "'my host' is neither a host name nor an IP address",
    "300.0.0.1:1": "300.0.0.1 is not an IPv4 address",
    "[12345::]:1": "12345:: is not an IPv6 address",
    "[gpu1]:1": "has brackets around a host that is no IPv6 address; write gpu1:1",
    "ipv6:::1:50051": "is an IPv6 address without brackets; write [::1]:50051",
    "ipv4:127.0.0.1": "has no port; write 127.0.0.1:50051",
    "dns:///gpu1": "has no port; write gpu1:50051",
}


@pytest.mark.parametrize("address", TAKEN)
def test_an_address_is_taken_as_it_is(address):
    assert check_address(address) == address
    assert is_local(address) is TAKEN[address]


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_gRPC_would_take_for_another_is_refused(address):
    with pytest.raises(InvalidArgument) as caught:
        check_address(address)
    (violation,) = caught.value.violations
    assert violation.field == "address"
    if address not in ("ipv6:::1:50051", "ipv4:127.0.0.1", "dns:///gpu1"):
        assert violation.description.startswith(repr(address))
    assert REFUSED[address] in str(caught.value)


LISTENS = {
    "[::]": ("::", "[::1]:7"),
    "::": ("::", "[::1]:7"),
    "[::1]": ("::1", "[::1]:7"),
    "0.0.0.0": ("0.0.0.0", "127.0.0.1:7"),
    "127.0.0.1": ("127.0.0.1", "127.0.0.1:7"),
    "localhost": ("localhost", "localhost:7"),
    "gpu1.example.com": ("gpu1.example.com", "gpu1.example.com:7"),
}
"""--host -> the host, and what a client on this machine dials."""


@pytest.mark.parametrize("host", LISTENS)
def test_what_a_server_listens_on_can_be_dialed(host):
    bare, address = LISTENS[host]
    assert listen_host(host) == bare
    assert dialed(bare, 7) == address
    assert check_address(address) == address
