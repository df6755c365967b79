"""Which addresses only this machine can reach: there a call may go unencrypted, and a token with it."""

from __future__ import annotations

import ipaddress

UNIX = "unix:"
SCHEMES = ("dns:", "ipv4:", "ipv6:")


def is_unix(address: str) -> bool:
    """Whether it is a socket in the file system, or one of Linux's abstract ones."""
    return address.startswith((UNIX, "unix-abstract:"))


def is_local(address: str) -> bool:
    """Whether a host, a HOST:PORT or an address in gRPC's notation is loopback or a Unix socket. A name other than
    localhost is not: what it means is decided elsewhere.
    """
    if is_unix(address):
        return True
    host = host_of(address)
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def host_of(address: str) -> str:
    """The host of HOST, HOST:PORT, [HOST]:PORT or the same behind `dns:///`, `ipv4:` or `ipv6:`."""
    for scheme in SCHEMES:
        if address.startswith(scheme):
            address = address.removeprefix(scheme).rpartition("/")[2]
    if address.startswith("["):
        return address[1:].partition("]")[0]
    # two colons and no bracket: an IPv6 address without a port
    return address.partition(":")[0] if address.count(":") == 1 else address
