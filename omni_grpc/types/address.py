"""Hosts and ports as users write them: what a server listens on, what a client dials, and how both are printed."""

from __future__ import annotations

import ipaddress
import re

MAX_PORT = 65535
WILDCARDS = ("0.0.0.0", "::")
"""Hosts to listen on that stand for every interface."""

UNIX = "unix:"
SCHEMES = ("dns:", "ipv4:", "ipv6:")

_NAME = re.compile(r"[\w-]+(\.[\w-]+)*\.?")
_NUMERIC = re.compile(r"[0-9.]+")


def listen_host(text: str) -> str:
    """The host of a server, an IPv6 address without its brackets, or a Unix socket as it is. Raises ValueError, whose
    text is the rule.
    """
    if text == "*":
        raise ValueError("not a host; use 0.0.0.0 for all interfaces")
    if is_unix(text):
        if not text.partition(":")[2]:
            raise ValueError("has no path; write unix:/run/omni-grpc.sock")
        return text
    if "://" in text:
        raise ValueError("a URL; give the host alone, and the port with --port")
    host, _, port = text.rpartition(":")
    if port.isdigit() and (host.endswith("]") or (host and ":" not in host)):
        raise ValueError(f"has a port; use --host {host} --port {port}")
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    check_host(bare)
    if bare != text and ":" not in bare:
        raise ValueError(f"brackets are for IPv6 addresses; write {bare}")
    return bare


def check_host(host: str) -> None:
    """Raises ValueError, whose text is the rule, for what is neither a name nor an IP address without brackets."""
    if not host:
        raise ValueError("has no host; use localhost for this machine")
    if ":" in host:
        if ip(host) is None:
            raise ValueError(f"{host} is not an IPv6 address")
    elif _NUMERIC.fullmatch(host):
        if ip(host) is None:
            raise ValueError(f"{host} is not an IPv4 address, which is four numbers of 0 to 255")
    elif not _NAME.fullmatch(host):
        raise ValueError(f"{host!r} is neither a host name nor an IP address")


def ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def joined(host: str, port: int | str) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dialed(host: str, port: int) -> str:
    """An address at which a client on the same machine reaches a server that listens on `host`."""
    if is_unix(host):
        return host
    return joined({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


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
