"""The client that calls webhooks: POSTs within the policy and the time that are given, and keeps no answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import email.utils
import math
import time
from collections.abc import AsyncIterable, Mapping

import httpcore2
import httpx2

from omni_grpc.config import OutboundConfig, WebhooksConfig
from omni_grpc.outbound.connections import Connections, Resolve, failed
from omni_grpc.outbound.policy import CALLING, Policy, Target
from omni_grpc.types.errors import Unavailable

DRAIN_BYTES = 1 << 16
DRAIN_SECONDS = 1.0
"""How much of the body of an answer is read, and thrown away: a receiver that is cut off while it answers may take that
for a failure.
"""
DIGITS = 9
"""Of the seconds of a Retry-After; more is no time that anybody waits for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """The status of an answer, and in how many seconds its host asks to be called again; None: it does not say."""

    status: int
    retry_after: float | None = None

    @property
    def delivered(self) -> bool:
        return 200 <= self.status < 300


class Poster:
    """POSTs for one server. It may be used on one event loop at a time."""

    def __init__(self, config: WebhooksConfig, outbound: OutboundConfig, *, resolve: Resolve | None = None) -> None:
        """`resolve`: stands in for the system's resolver. Raises ConfigError for a file of authorities that cannot be
        read.
        """
        self._policy = Policy(config.origins, CALLING)
        self._timeout = config.webhook_timeout
        self._connections = Connections(
            self._policy, timeout=self._timeout, authorities=outbound.outbound_ca, resolve=resolve
        )

    def close(self) -> None:
        """Ends its threads, once they have nothing to do."""
        self._connections.close()

    def check(self, url: str, *, field: str) -> Target:
        """The parts of a URL that may be called. Raises InvalidArgument that names the field, for one that `post` would
        refuse before it asks the network.
        """
        return self._policy.check(url, field=field)

    def host(self, url: str) -> str:
        """The host of a URL that was checked before, whether it is still listed or not."""
        return self._policy.host(url)

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], *, field: str) -> Answered:
        """What a receiver answers; a redirect is a status like another. Cancelled, it closes the connection.

        Every refusal names the field and the host, and repeats nothing that the host has sent. Raises InvalidArgument
        for a URL or an address that is not allowed (see `Policy`); FailedPrecondition for a name that there is not and
        for a certificate that is not valid; Unavailable for a host that does not answer now, or not within the time.
        """
        target = self._policy.check(url, field=field)
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._connections.asked("POST", target, field=field, headers=headers, content=body) as response,
            ):
                retry_after = httpx2.Headers(response.headers).get("retry-after")
                answered = Answered(response.status, _seconds(retry_after, time.time()))
                await _drain(response.aiter_stream())
                return answered
        except TimeoutError:
            rule = f"names {target.host}, which took longer than {self._timeout:g} s to answer (--webhook-timeout)"
            raise failed(Unavailable, field, "OUTBOUND_TIMEOUT", rule) from None


async def _drain(stream: AsyncIterable[bytes]) -> None:
    """Reads a little more. The status has said all: what goes wrong from here on changes nothing."""
    size = 0
    with contextlib.suppress(TimeoutError, httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for chunk in stream:
                size += len(chunk)
                if size > DRAIN_BYTES:
                    return


def _seconds(retry_after: str | None, now: float) -> float | None:
    """The time that a Retry-After names, in seconds or as a date (RFC 9110, 10.2.3); None for what is neither."""
    text = (retry_after or "").strip()
    if text.isdecimal() and text.isascii():
        return float(text) if len(text) <= DIGITS else math.inf
    try:
        date = email.utils.parsedate_to_datetime(text)
        return max(0.0, date.timestamp() - now)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
