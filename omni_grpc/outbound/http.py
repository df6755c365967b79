"""The client: fetches a URL within the policy, the size and the time that are given.

A connection is made for each hop, to an address that the policy has checked, so nothing is resolved a second time.
Proxies and certificates that the environment names are not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import ssl
import time
import zlib
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpcore2
import httpx2

from omni_grpc.config import OutboundConfig
from omni_grpc.config.origins import Address
from omni_grpc.outbound.policy import Policy, Target
from omni_grpc.types.errors import ConfigError, FailedPrecondition, InvalidArgument, OmniError, Unavailable, Violation
from omni_grpc.types.version import __version__

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name, for a port. Raises socket.gaierror."""

REDIRECTS = 5
"""The most redirects that are followed."""
CONNECT_SECONDS = 10.0
"""How long all addresses of a host together get to take a connection, and then to agree on TLS."""
RESOLVERS = 4
"""Threads that resolve names. Their own, since a name server that does not answer holds them for half a minute."""
STEP_BYTES = 1 << 20
"""The most that is decompressed in one go, so that the event loop is not held up."""
MOVED = frozenset({301, 302, 303, 307, 308})
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses with which a host asks to come back later."""
HEADERS: Mapping[bytes | str, bytes | str] = {
    "User-Agent": f"omni_grpc/{__version__}",
    "Accept": "*/*",
    # media are compressed already; a host that compresses anyway is understood
    "Accept-Encoding": "identity",
    "Connection": "close",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a URL had: its bytes, the media type that its host declares ("" for none), and where it was in the end."""

    data: bytes
    content_type: str
    final_url: str


class Outbound:
    """Fetches for one server. It may be used on one event loop at a time."""

    def __init__(self, config: OutboundConfig, *, resolve: Resolve | None = None) -> None:
        """`resolve`: stands in for the system's resolver. Raises ConfigError for a file of authorities that cannot be
        read.
        """
        self._policy = Policy(config)
        self._timeout = config.outbound_timeout
        self._resolve = resolve or self._ask_system
        self._resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="omni_grpc-resolver")
        self._ssl = _ssl_context(config.outbound_ca) if config.outbound_hosts or config.outbound_ca else None

    def close(self) -> None:
        """Ends its threads, once they have nothing to do."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    def check(self, url: str, *, field: str, instead: str = "") -> None:
        """Raises InvalidArgument that names the field, for a URL that `fetch` would refuse before it asks the network.

        `instead` ends the message: what the caller can do without a URL.
        """
        self._policy.check(url, field=field, instead=instead)

    async def fetch(self, url: str, *, field: str, max_bytes: int, instead: str = "") -> Fetched:
        """Fetches at most `max_bytes` bytes, as they are sent and decoded. Cancelled, it closes the connection.

        Every refusal names the field and the host, and repeats nothing that the host has sent. Raises InvalidArgument
        for a URL, a redirect or an address that is not allowed (see `Policy`) and for too many bytes
        (OUTBOUND_TOO_LARGE); FailedPrecondition for a host whose answer will not change by itself; Unavailable for one
        that does not answer now, or not within the time.
        """
        target = self._policy.check(url, field=field, instead=instead)
        try:
            async with asyncio.timeout(self._timeout):
                for _ in range(REDIRECTS + 1):
                    found = await self._hop(target, field, max_bytes, instead)
                    if isinstance(found, Fetched):
                        logger.info("fetched %d bytes from %s", len(found.data), target.host)
                        return found
                    target = self._policy.redirect(target, found, field=field, instead=instead)
        except TimeoutError:
            rule = f"took longer than {self._timeout:g} s to fetch from {target.host} (--outbound-timeout); try again"
            raise _failed(Unavailable, field, "OUTBOUND_TIMEOUT", rule) from None
        rule = f"is redirected more than {REDIRECTS} times, lately to {target.host}; send the URL of the file itself"
        raise _failed(FailedPrecondition, field, "OUTBOUND_TOO_MANY_REDIRECTS", rule)

    async def _hop(self, target: Target, field: str, max_bytes: int, instead: str) -> Fetched | bytes:
        """What is there, or the Location that it has moved to."""
        backend = _Pinned(await self._addresses(target, field, instead))
        url = httpcore2.URL(
            scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path
        )
        timeouts = dict.fromkeys(("read", "write"), self._timeout) | {"connect": min(CONNECT_SECONDS, self._timeout)}
        with _faults_of(target, field):
            async with (
                httpcore2.AsyncHTTPConnection(url.origin, self._ssl, network_backend=backend) as connection,
                connection.stream(
                    "GET", url, headers={"Host": target.authority, **HEADERS}, extensions={"timeout": timeouts}
                ) as response,
            ):
                headers = httpx2.Headers(response.headers)
                if response.status in MOVED and "location" in headers:
                    return next(value for name, value in response.headers if name.lower() == b"location")
                _check_status(response.status, target, field)
                data = await _body(response.aiter_stream(), headers, target, field, max_bytes)
        return Fetched(data=data, content_type=headers.get("content-type", ""), final_url=str(target.url))

    async def _addresses(self, target: Target, field: str, instead: str) -> tuple[Address, ...]:
        if target.address is not None:
            return (target.address,)
        try:
            found = await self._resolve(target.host, target.port)
        except socket.gaierror as error:
            rule = f"names {target.host}, which cannot be resolved: {error.strerror}"
            if error.errno == socket.EAI_AGAIN:
                raise _failed(Unavailable, field, "OUTBOUND_UNREACHABLE", f"{rule}; try again") from error
            raise _failed(FailedPrecondition, field, "OUTBOUND_NAME_NOT_FOUND", f"{rule}; check the name") from error
        try:
            return self._policy.addresses(target, found, field=field, instead=instead)
        except InvalidArgument:
            logger.warning("refused to fetch from %s, which has the addresses %s", target.host, ", ".join(found))
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


def _check_status(status: int, target: Target, field: str) -> None:
    if status == 200:
        return
    kind = Unavailable if status in TRANSIENT else FailedPrecondition
    fix = "try again later" if kind is Unavailable else "check that the URL is right and needs no login"
    rule = f"names {target.host}, which answered with HTTP status {status}; {fix}"
    raise _failed(kind, field, "OUTBOUND_STATUS", rule, {"status": str(status)})


async def _body(
    stream: AsyncIterable[bytes], headers: httpx2.Headers, target: Target, field: str, max_bytes: int
) -> bytes:
    """The decoded body. Raises as soon as it is known to be too large."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip"):
        rule = f"names {target.host}, which sent an encoding that was not asked for; only gzip is decoded"
        raise _failed(FailedPrecondition, field, "OUTBOUND_BAD_RESPONSE", rule)
    declared = headers.get("content-length", "")
    size = _Size(max_bytes, target, field)
    if declared.isdecimal():
        size.check(int(declared))
    gzip = None if encoding == "identity" else _Gzip(target, field)
    chunks: list[bytes] = []
    encoded = decoded = 0
    async for chunk in stream:
        encoded += len(chunk)
        size.check(encoded)
        for piece in (chunk,) if gzip is None else gzip.pieces(chunk):
            decoded += len(piece)
            size.check(decoded)
            chunks.append(piece)
            await asyncio.sleep(0)
    if gzip is not None:
        gzip.check_end()
    return b"".join(chunks)


@dataclasses.dataclass(frozen=True, slots=True)
class _Size:
    most: int
    target: Target
    field: str

    def check(self, size: int) -> None:
        if size > self.most:
            rule = f"names a file on {self.target.host} that has more than {self.most} bytes; send a smaller one"
            raise _failed(InvalidArgument, self.field, "OUTBOUND_TOO_LARGE", rule)


class _Gzip:
    """Decompresses one body, a step at a time: a kilobyte can become a megabyte."""

    def __init__(self, target: Target, field: str) -> None:
        self._target = target
        self._field = field
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._any = False

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        self._any = self._any or bool(chunk)
        while chunk:
            if self._member.eof:  # a file of several members, each compressed by itself
                self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
            try:
                yield self._member.decompress(chunk, STEP_BYTES)
            except zlib.error as error:
                raise self._broken() from error
            chunk = self._member.unused_data if self._member.eof else self._member.unconsumed_tail

    def check_end(self) -> None:
        # the end of a member comes behind all that it holds, so nothing of that is left where the end was seen
        if self._any and not self._member.eof:
            raise self._broken()

    def _broken(self) -> OmniError:
        rule = f"names {self._target.host}, which sent gzip data that are broken or cut off; try again"
        return _failed(Unavailable, self._field, "OUTBOUND_BAD_RESPONSE", rule)


@contextlib.contextmanager
def _faults_of(target: Target, field: str) -> Iterator[None]:
    """Turns what goes wrong with a host into an error of the field."""
    try:
        yield
    except httpcore2.TimeoutException as error:
        rule = f"names {target.host}, which did not answer in time; try again"
        raise _failed(Unavailable, field, "OUTBOUND_TIMEOUT", rule) from error
    except httpcore2.ConnectError as error:
        if isinstance(error.__cause__, ssl.SSLCertVerificationError):
            rule = (
                f"names {target.host}, whose certificate is not valid: {error.__cause__.verify_message}; for a private "
                "certificate authority, the operator sets --outbound-ca"
            )
            raise _failed(FailedPrecondition, field, "OUTBOUND_CERTIFICATE_INVALID", rule) from error
        rule = f"names {target.host}, to which no connection could be made; try again"
        raise _failed(Unavailable, field, "OUTBOUND_UNREACHABLE", rule) from error
    except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
        rule = f"names {target.host}, whose answer ended early or is not HTTP; try again"
        raise _failed(Unavailable, field, "OUTBOUND_BAD_RESPONSE", rule) from error


def _failed(
    kind: type[OmniError], field: str, reason: str, rule: str, metadata: Mapping[str, str] | None = None
) -> OmniError:
    violations = (Violation(field, rule),)
    return kind(f"{field}: {rule}", reason=reason, violations=violations, metadata=metadata)
