"""How ranks on several machines meet: at an address of rank 0, on the interface by which each of them reaches it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from omni_grpc.types.ranks import INTERFACES, RANK, RENDEZVOUS, TCP, WORLD_SIZE

SIOCGIFADDR = 0x8915
"""The request of Linux for the IPv4 address of an interface."""
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def meeting(rank: int, world: int, host: str, port: int, name: str) -> Mapping[str, str]:
    """The variables of a rank that meets the others at a store. `name` is that of their meeting: none has had it there
    before. What the environment says of interfaces stands.
    """
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    variables = {RANK: str(rank), WORLD_SIZE: str(world), RENDEZVOUS: f"{TCP}{place}/{name}"}
    if interface := interface_to(host):
        variables.update({each: os.environ.get(each, interface) for each in INTERFACES})
    return variables


def interface_to(host: str) -> str | None:
    """The network interface by which this machine reaches another one, or itself. None where that cannot be told (gloo
    then goes by the host's name, NCCL by what it finds). Raises OSError where the name means nothing or no way leads
    there.
    """
    if sys.platform != "linux":
        return None
    own = address_to(host)
    if ipaddress.ip_address(own).is_loopback:
        return "lo"
    return next((name for _, name in socket.if_nameindex() if own in _addresses(name)), None)


def address_to(host: str) -> str:
    """The address that this machine has for another one. Raises OSError, as `interface_to`."""
    family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # of a datagram socket: it asks the routes, and sends nothing
        probe.connect(place)
        return str(probe.getsockname()[0]).partition("%")[0]


def _addresses(interface: str) -> list[str]:
    import fcntl  # not on Windows

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        # it has none
        answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    if IPV6_ADDRESSES.exists():
        lines = [line.split() for line in IPV6_ADDRESSES.read_text().splitlines()]
        found += [str(ipaddress.ip_address(bytes.fromhex(line[0]))) for line in lines if line[-1] == interface]
    return found
