"""Listening on an address: a port, with or without TLS, or a Unix socket; and if that cannot be, why not. gRPC reports
neither the reason nor half a success.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Mapping
from typing import Any

import grpc

from omni_grpc.types.address import UNIX, is_local, is_unix, joined
from omni_grpc.types.errors import ConfigError, Violation

logger = logging.getLogger(__name__)

_WHY: Mapping[int, tuple[str, str]] = {
    errno.EADDRINUSE: (
        "port",
        "the port is in use by another program, such as another server; stop that one, or choose another --port (0 "
        "picks a free one)",
    ),
    errno.EACCES: ("port", "this user may not listen on a port below 1024; choose a --port from 1024 to 65535"),
    errno.EADDRNOTAVAIL: (
        "host",
        "no interface of this machine has that address; choose a --host that one has, or 0.0.0.0 for all interfaces",
    ),
    errno.EAFNOSUPPORT: ("host", "this machine has no IPv6; choose an IPv4 address as --host"),
}
"""errno of a bind -> the setting at fault, and what to do."""


def bind(
    server: Any,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None,
    *,
    field: str = "host",
    beside: bool = False,
) -> int:
    """Has a grpc.aio server listen, and returns the real port; 0 for a Unix socket. `field` is the setting that names
    the host; `beside`: another server listens there, and has agreed.

    Raises ConfigError (CANNOT_LISTEN).
    """
    try:
        return _bind(server, host, port, credentials, beside)
    except ConfigError as error:
        if field == "host":
            raise
        flag = "--" + field.replace("_", "-")
        message = str(error).replace("--host or --port", flag).replace("--host", flag).replace("--port", flag)
        raise ConfigError(message, reason=error.reason, violations=(Violation(field, message),)) from error


def _bind(server: Any, host: str, port: int, credentials: grpc.ServerCredentials | None, beside: bool) -> int:
    if is_unix(host):
        # they are of this machine, and the file's mode says who may connect: TLS would have no name to check
        _check_socket(host)
        address, credentials = host, None
    else:
        if not beside:
            check_free(host, port)
        address = joined(host, port)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        why = "the operating system refused the address; choose another --host or --port"
        raise cannot_listen(host, port, why) from error
    if credentials is None and not is_local(host):
        logger.warning("%s is served without TLS (--insecure): whatever crosses the network there can be read", address)
    return 0 if is_unix(host) else int(bound)


def bind_socket(
    host: str, port: int, *, host_field: str, port_field: str, shared: bool = False, beside: bool = False
) -> socket.socket:
    """A listening socket of a host name or address. `shared`: another server may listen there later; `beside`: one
    does. Raises ConfigError (CANNOT_LISTEN) that names these settings.
    """
    try:
        if not beside:
            check_free(host, port)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # with its protocol: asyncio turns Nagle's algorithm off only where it reads that this is TCP
        found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared or beside:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            found.bind(address)
            found.listen(1024)
        except OSError as error:
            found.close()
            raise cannot_listen(host, port, f"{error.strerror or error}; choose another --port", "port") from error
        return found
    except ConfigError as error:
        names = {"host": host_field, "port": port_field}
        message = str(error)
        for name, other in names.items():
            message = message.replace(f"--{name} ", f"--{other.replace('_', '-')} ")
        fields = tuple(Violation(names[one.field], message) for one in error.violations)
        raise ConfigError(message, reason=error.reason, violations=fields) from error


def check_free(host: str, port: int) -> None:
    """Raises ConfigError (CANNOT_LISTEN) if nothing can listen there, or if only some of a host's addresses are free:
    `localhost` has two, and a client that tries the other one first would reach another server.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        why = f"the name cannot be resolved ({error.strerror}); choose an IP address of this machine as --host"
        raise cannot_listen(host, port, why, "host") from error
    problems = [problem for address in found if (problem := _problem(address)) is not None]
    taken = [problem for problem in problems if problem.errno == errno.EADDRINUSE]
    if taken or len(problems) == len(found):
        worst = (taken or problems)[0]
        field, why = _WHY.get(worst.errno or 0, ("host", f"{worst.strerror}; choose another --host or --port"))
        raise cannot_listen(host, port, why, field) from worst


def cannot_listen(host: str, port: int, why: str, field: str = "host") -> ConfigError:
    message = f"cannot listen on {host if is_unix(host) else joined(host, port)}: {why}"
    return ConfigError(message, reason="CANNOT_LISTEN", violations=(Violation(field, message),))


def _problem(address: tuple[int, int, int, str, tuple[object, ...]]) -> OSError | None:
    """What keeps a socket from being bound to one address; None if nothing does."""
    family, kind, protocol, _, where = address
    try:
        with socket.socket(family, kind, protocol) as probe:
            # as gRPC does it: connections of a server that has just ended do not keep the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                with contextlib.suppress(OSError):  # not every system can; gRPC then listens on IPv6 alone
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(where)
    except OSError as error:
        return error
    return None


def _check_socket(address: str) -> None:
    """Raises ConfigError (CANNOT_LISTEN) where a socket cannot be made, or a server listens on it already, from which
    gRPC would take it away. One that nobody listens on is left over, and goes.
    """
    path = _path(address)
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.settimeout(1.0)
        probe.connect(path)
        raise cannot_listen(address, 0, "another server uses that socket; stop that one, or choose another --host")
    abstract = path.startswith("\0")
    try:
        if not abstract and os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise cannot_listen(address, 0, "there is a file that is no socket; choose another --host")
            os.unlink(path)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(path)
        if not abstract:
            os.unlink(path)
    except OSError as error:
        raise cannot_listen(address, 0, f"{error.strerror or error}; choose another --host") from error


def _path(address: str) -> str:
    """A path as the operating system takes it; an abstract name begins with a zero byte."""
    scheme, _, path = address.partition(":")
    return path.removeprefix("//") if scheme + ":" == UNIX else "\0" + path
