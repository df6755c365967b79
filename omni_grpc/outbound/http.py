"""The client: fetches a URL within the policy, the size and the time that are given."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import zlib
from collections.abc import AsyncIterable, Iterator

import httpx2

from omni_grpc.config import OutboundConfig
from omni_grpc.outbound.connections import Connections, Resolve, failed
from omni_grpc.outbound.policy import Policy, Target
from omni_grpc.types.errors import FailedPrecondition, InvalidArgument, OmniError, Unavailable

logger = logging.getLogger(__name__)

REDIRECTS = 5
"""The most redirects that are followed."""
STEP_BYTES = 1 << 20
"""The most that is decompressed in one go, so that the event loop is not held up."""
MOVED = frozenset({301, 302, 303, 307, 308})
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses with which a host asks to come back later."""


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
        self._policy = Policy(config.origins)
        self._timeout = config.outbound_timeout
        self._connections = Connections(
            self._policy, timeout=self._timeout, authorities=config.outbound_ca, resolve=resolve
        )

    def close(self) -> None:
        """Ends its threads, once they have nothing to do."""
        self._connections.close()

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
            raise failed(Unavailable, field, "OUTBOUND_TIMEOUT", rule) from None
        rule = f"is redirected more than {REDIRECTS} times, lately to {target.host}; send the URL of the file itself"
        raise failed(FailedPrecondition, field, "OUTBOUND_TOO_MANY_REDIRECTS", rule)

    async def _hop(self, target: Target, field: str, max_bytes: int, instead: str) -> Fetched | bytes:
        """What is there, or the Location that it has moved to."""
        async with self._connections.asked("GET", target, field=field, instead=instead) as response:
            headers = httpx2.Headers(response.headers)
            if response.status in MOVED and "location" in headers:
                return next(value for name, value in response.headers if name.lower() == b"location")
            _check_status(response.status, target, field)
            data = await _body(response.aiter_stream(), headers, target, field, max_bytes)
        return Fetched(data=data, content_type=headers.get("content-type", ""), final_url=str(target.url))


def _check_status(status: int, target: Target, field: str) -> None:
    if status == 200:
        return
    kind = Unavailable if status in TRANSIENT else FailedPrecondition
    fix = "try again later" if kind is Unavailable else "check that the URL is right and needs no login"
    rule = f"names {target.host}, which answered with HTTP status {status}; {fix}"
    raise failed(kind, field, "OUTBOUND_STATUS", rule, {"status": str(status)})


async def _body(
    stream: AsyncIterable[bytes], headers: httpx2.Headers, target: Target, field: str, max_bytes: int
) -> bytes:
    """The decoded body. Raises as soon as it is known to be too large."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip"):
        rule = f"names {target.host}, which sent an encoding that was not asked for; only gzip is decoded"
        raise failed(FailedPrecondition, field, "OUTBOUND_BAD_RESPONSE", rule)
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
            raise failed(InvalidArgument, self.field, "OUTBOUND_TOO_LARGE", rule)


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
        return failed(Unavailable, self._field, "OUTBOUND_BAD_RESPONSE", rule)
