"""Hosts and ports as users write them: what a server listens on, what a client dials, and how both are printed."""

from __future__ import annotations

import ipaddress
import re

MAX_PORT = 65535
WILDCARDS = ("0.0.0.0", "::")
"""Hosts to listen on that stand for every interface."""

_NAME = re.compile(r"[\w-]+(\.[\w-]+)*\.?")
_NUMERIC = re.compile(r"[0-9.]+")


def listen_host(text: str) -> str:
    """The host of a server, an IPv6 address without its brackets. Raises ValueError, whose text is the rule."""
    if text == "*":
        raise ValueError("not a host; use 0.0.0.0 for all interfaces")
    if text.startswith("unix:"):
        raise ValueError("a Unix socket, but the server listens on TCP; use a host name or an IP address")
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
    return joined({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
