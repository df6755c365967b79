"""Listening on an address: a port, with or without TLS, or a Unix socket."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import Any

import grpc

from omni_grpc.types.address import UNIX, host_of, is_local, is_unix
from omni_grpc.types.errors import ConfigError

logger = logging.getLogger(__name__)


def listen_address(host: str, port: int) -> str:
    """What gRPC calls it. A Unix socket has no port."""
    if is_unix(host):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(server: Any, address: str, credentials: grpc.ServerCredentials | None, *, change: str) -> str:
    """Has a grpc.aio server listen, and returns the address with the real port. Raises ConfigError (CANNOT_LISTEN);
    `change` says which settings choose another address.
    """
    if is_unix(address):
        # they are of this machine, and the file's mode says who may connect: TLS would have no name to check
        _refuse_taken(address, change)
        credentials = None
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise _cannot(address, _why(address), change) from error
    if credentials is None and not is_local(address):
        logger.warning("%s is served without TLS (--insecure): whatever crosses the network there can be read", address)
    return address if is_unix(address) else f"{address.rpartition(':')[0]}:{port}"


def port_of(address: str) -> int:
    """The port of a bound address, 0 for a Unix socket."""
    return 0 if is_unix(address) else int(address.rpartition(":")[2])


def _refuse_taken(address: str, change: str) -> None:
    """gRPC would take the socket away from a server that uses it. One that nobody listens on is left over, and goes."""
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.settimeout(1.0)
        probe.connect(_path(address))
        raise _cannot(address, "Address already in use", change)


def _path(address: str) -> str:
    """A path as the operating system takes it; an abstract name begins with a zero byte."""
    scheme, _, path = address.partition(":")
    return path.removeprefix("//") if scheme + ":" == UNIX else "\0" + path


def _cannot(address: str, why: str, change: str) -> ConfigError:
    return ConfigError(f"cannot listen on {address}: {why}; choose another {change}", reason="CANNOT_LISTEN")


def _why(address: str) -> str:
    """The operating system's error for an address, which grpc does not pass on."""
    try:
        if is_unix(address):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(_path(address))
            if not _path(address).startswith("\0"):
                os.unlink(_path(address))
        else:
            host, port = host_of(address), int(address.rpartition(":")[2])
            family, kind, protocol, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(found)
    except OSError as error:
        return str(error.strerror or error)
    return "the operating system refused the address"
