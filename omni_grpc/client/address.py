"""The address of a server as a caller gives it, and the HTTP proxy through which gRPC would reach it.

gRPC takes its proxy from the environment (https://grpc.github.io/grpc/core/md_doc_environment_variables.html). It does
so for this machine too, where no proxy can reach the server, so channels to this machine are opened without it.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from omni_grpc.types.address import MAX_PORT, check_host, ip, joined
from omni_grpc.types.errors import InvalidArgument, Violation

DEFAULT_PORT = 50051

_HOSTS = ("dns", "ipv4", "ipv6")
"""Schemes of gRPC whose addresses are HOST:PORT."""
_SOCKETS = ("unix", "unix-abstract")
_OTHERS = ("vsock", "xds", "google-c2p")
_LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that gRPC reads, the first one that is set; upper case it does not read."""
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")


def check_address(address: str) -> str:
    """The address: HOST:PORT, [IPV6]:PORT, or a target of gRPC such as unix:/path or dns:///HOST:PORT.

    Raises InvalidArgument (address) for any other, since gRPC would dial something else: port 443 where there is none,
    port 4464 where there is 70000.
    """
    try:
        for host_and_port in _hosts_and_ports(address):
            _split(host_and_port)
    except ValueError as error:
        rule = f"{address!r} {error}"
        raise InvalidArgument(f"address {rule}", violations=(Violation("address", rule),)) from None
    return address


def is_local(address: str) -> bool:
    """Whether a valid address is on this machine: a loopback address or name, every interface, a Unix socket."""
    if address.partition(":")[0] in _SOCKETS:
        return True
    hosts = [_split(one)[0] for one in _hosts_and_ports(address)]
    return bool(hosts) and all(map(_is_loopback, hosts))


def proxy_note(address: str, environ: Mapping[str, str] = os.environ) -> str:
    """Which variable sends calls to a valid address through a proxy, and what to do about it; "" if none does."""
    variable = next((name for name in _PROXIES if name in environ), None)
    if variable is None or is_local(address):
        return ""
    hosts = [_split(one)[0] for one in _hosts_and_ports(address)]
    proxy = urlsplit(environ[variable])
    exceptions = next((environ[name] for name in _EXCEPTIONS if name in environ), "")
    if not hosts or proxy.scheme != "http" or not proxy.hostname or all(_excepted(h, exceptions) for h in hosts):
        return ""
    # not as it is: it may hold a password
    where = proxy.netloc.rpartition("@")[2]
    return (
        f"calls to it go through the proxy {where} of the environment variable {variable}; if the server is to be "
        f"reached directly, add {hosts[0]} to no_proxy or unset {variable}"
    )


def _hosts_and_ports(address: str) -> Iterator[str]:
    """Each HOST:PORT in an address; none where gRPC finds the server by other means. Raises ValueError for a URL."""
    scheme, _, rest = address.partition(":")
    if scheme in (*_SOCKETS, *_OTHERS):
        return
    if scheme not in _HOSTS:
        if rest.startswith("//"):
            host = rest.strip("/").partition("/")[0]
            if not re.search(r":\d+$", host):
                host = joined(host.strip("[]"), DEFAULT_PORT)
            raise ValueError(f"is a URL; write {host}")
        yield address
        return
    endpoint = rest[2:].partition("/")[2] if rest.startswith("//") else rest
    yield from endpoint.split(",") if scheme != "dns" else (endpoint,)


def _split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPV6]:PORT. Raises ValueError, whose text is the rule, for anything else."""
    if address != address.strip():
        raise ValueError("has blanks around it; leave them out")
    bracketed = re.fullmatch(r"\[(.*)\](?::(.*))?", address)
    if bracketed:
        host, port = bracketed.groups()
        if ":" not in host:
            plain = joined(host, port or DEFAULT_PORT)
            raise ValueError(f"has brackets around a host that is no IPv6 address; write {plain}")
    elif address.count(":") > 1:
        raise ValueError(_without_brackets(address))
    else:
        host, colon, port = address.partition(":")
        port = port if colon else None
    if port is None:
        raise ValueError(f"has no port; write {joined(host or 'localhost', DEFAULT_PORT)}")
    if not host:
        raise ValueError(f"has no host; write localhost:{port or DEFAULT_PORT}")
    check_host(host)
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= MAX_PORT:
        raise ValueError(f"has the port {port!r}; a port is a number from 1 to {MAX_PORT}")
    return host, int(port)


def _without_brackets(address: str) -> str:
    if ip(address) is not None:
        return f"is an IPv6 address without a port; write {joined(address, DEFAULT_PORT)}"
    host, _, port = address.rpartition(":")
    if ip(host) is not None:
        return f"is an IPv6 address without brackets; write {joined(host, port)}"
    return "is not HOST:PORT; write an IPv6 address as [::1]:50051"


def _is_loopback(host: str) -> bool:
    if (number := ip(host)) is None:
        name = host.lower().rstrip(".")
        return name in _LOCAL_NAMES or name.endswith(".localhost")
    number = getattr(number, "ipv4_mapped", None) or number
    return number.is_loopback or number.is_unspecified


def _excepted(host: str, exceptions: str) -> bool:
    """Whether gRPC leaves the proxy out for a host: by the end of its name, or by its network."""
    for entry in filter(None, map(str.strip, exceptions.split(","))):
        if host.lower().endswith(entry.lower()):
            return True
        try:
            network = ipaddress.ip_network(entry, strict=False)
        except ValueError:
            continue
        if (number := ip(host)) is not None and number in network:
            return True
    return False
