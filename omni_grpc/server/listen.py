"""Whether a server can listen on an address, and if not, why. gRPC reports neither the reason nor half a success."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Mapping

from omni_grpc.types.address import joined
from omni_grpc.types.errors import ConfigError, Violation

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
    message = f"cannot listen on {joined(host, port)}: {why}"
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
