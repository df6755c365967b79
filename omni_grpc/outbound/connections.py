"""Connections to hosts that the policy allows, each to an address that it has checked: a name is resolved once.

Proxies and certificates that the environment names are not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpcore2
import httpx2

from omni_grpc.config.origins import Address
from omni_grpc.outbound.policy import Policy, Target
from omni_grpc.types.errors import ConfigError, FailedPrecondition, InvalidArgument, OmniError, Unavailable, Violation
from omni_grpc.types.version import __version__

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name, for a port. Raises socket.gaierror."""

CONNECT_SECONDS = 10.0
"""How long all addresses of a host together get to take a connection, and then to agree on TLS."""
RESOLVERS = 4
"""Threads that resolve names. Their own, since a name server that does not answer holds them for half a minute."""
HEADERS: Mapping[bytes | str, bytes | str] = {
    "User-Agent": f"omni_grpc/{__version__}",
    "Accept": "*/*",
    # media are compressed already; a host that compresses anyway is understood
    "Accept-Encoding": "identity",
    "Connection": "close",
}


class Connections:
    """Makes requests, each on a connection of its own. It may be used on one event loop at a time."""

    def __init__(
        self, policy: Policy, *, timeout: float, authorities: str | None = None, resolve: Resolve | None = None
    ) -> None:
        """`timeout`: seconds for each read and write. `authorities`: a PEM file of those that are trusted beside the
        system's. `resolve`: stands in for the system's resolver. Raises ConfigError for a file that cannot be read.
        """
        self._policy = policy
        self._timeout = timeout
        self._resolve = resolve or self._ask_system
        self._resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="omni_grpc-resolver")
        self._ssl = _ssl_context(authorities) if policy.lists_any or authorities else None

    def close(self) -> None:
        """Ends its threads, once they have nothing to do."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def asked(
        self,
        method: str,
        target: Target,
        *,
        field: str,
        instead: str = "",
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> AsyncIterator[httpcore2.Response]:
        """The answer to one request, its body still to be read; whatever its status, and a redirect is not followed.
        What goes wrong with the host meanwhile is raised as an error of the field.
        """
        backend = _Pinned(await self._addresses(target, field, instead))
        url = httpcore2.URL(
            scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path
        )
        timeouts = dict.fromkeys(("read", "write"), self._timeout) | {"connect": min(CONNECT_SECONDS, self._timeout)}
        sent: dict[bytes | str, bytes | str] = {"Host": target.authority, **HEADERS}
        sent |= dict((headers or {}).items())
        if content is not None:
            sent["Content-Length"] = str(len(content))
        with _faults_of(target, field):
            async with (
                httpcore2.AsyncHTTPConnection(url.origin, self._ssl, network_backend=backend) as connection,
                connection.stream(
                    method, url, headers=sent, content=content, extensions={"timeout": timeouts}
                ) as response,
            ):
                yield response

    async def _addresses(self, target: Target, field: str, instead: str) -> tuple[Address, ...]:
        if target.address is not None:
            return (target.address,)
        try:
            found = await self._resolve(target.host, target.port)
        except socket.gaierror as error:
            rule = f"names {target.host}, which cannot be resolved: {error.strerror}"
            if error.errno == socket.EAI_AGAIN:
                raise failed(Unavailable, field, "OUTBOUND_UNREACHABLE", f"{rule}; try again") from error
            raise failed(FailedPrecondition, field, "OUTBOUND_NAME_NOT_FOUND", f"{rule}; check the name") from error
        try:
            return self._policy.addresses(target, found, field=field, instead=instead)
        except InvalidArgument:
            logger.warning("refused to connect to %s, which has the addresses %s", target.host, ", ".join(found))
            raise

    async def _ask_system(self, host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._resolvers, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(sockaddr[0]) for *_, sockaddr in found]


class _Pinned(httpcore2.AsyncNetworkBackend):
    """Connects to addresses that were checked, one after the other, whatever name is asked for."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        end = time.monotonic() + (CONNECT_SECONDS if timeout is None else timeout)
        failed: Exception = httpcore2.ConnectError("it has no address")
        for tried, address in enumerate(self._addresses):
            # one address that drops what it is sent leaves time for the others
            share = max(0.0, end - time.monotonic()) / (len(self._addresses) - tried)
            try:
                return await self._network.connect_tcp(str(address), port, share, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failed = error
        raise failed


def _ssl_context(authorities: str | None) -> ssl.SSLContext:
    context = httpx2.create_ssl_context(trust_env=False)
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except (OSError, ssl.SSLError) as error:
            message = f"--outbound-ca {authorities}: {error.strerror or 'it is no PEM file of certificates'}"
            raise ConfigError(message, violations=(Violation("outbound_ca", message),)) from error
    return context


@contextlib.contextmanager
def _faults_of(target: Target, field: str) -> Iterator[None]:
    """Turns what goes wrong with a host into an error of the field."""
    try:
        yield
    except httpcore2.TimeoutException as error:
        rule = f"names {target.host}, which did not answer in time; try again"
        raise failed(Unavailable, field, "OUTBOUND_TIMEOUT", rule) from error
    except httpcore2.ConnectError as error:
        if isinstance(error.__cause__, ssl.SSLCertVerificationError):
            rule = (
                f"names {target.host}, whose certificate is not valid: {error.__cause__.verify_message}; for a private "
                "certificate authority, the operator sets --outbound-ca"
            )
            raise failed(FailedPrecondition, field, "OUTBOUND_CERTIFICATE_INVALID", rule) from error
        rule = f"names {target.host}, to which no connection could be made; try again"
        raise failed(Unavailable, field, "OUTBOUND_UNREACHABLE", rule) from error
    except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
        rule = f"names {target.host}, whose answer ended early or is not HTTP; try again"
        raise failed(Unavailable, field, "OUTBOUND_BAD_RESPONSE", rule) from error


def failed(
    kind: type[OmniError], field: str, reason: str, rule: str, metadata: Mapping[str, str] | None = None
) -> OmniError:
    """The error of one field, for what went wrong with a host."""
    violations = (Violation(field, rule),)
    return kind(f"{field}: {rule}", reason=reason, violations=violations, metadata=metadata)
