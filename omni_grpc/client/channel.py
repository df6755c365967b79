"""Channel options, deadlines, and the policy for reconnecting a lost stream."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Mapping
from typing import Any

from omni_grpc.client.address import is_local

UNARY_TIMEOUT = 30.0
"""Timeout of a unary call in seconds, including its retries."""

CANCEL_TIMEOUT = 5.0
"""Seconds that leaving a stream waits for the server to accept the cancellation, and again for the job to stop."""

# gRPC itself retries a call that gets UNAVAILABLE before its first message. That is safe for every RPC of this client:
# those that create a job carry a request_id, the others only read or are idempotent.
_SERVICE_CONFIG: Mapping[str, Any] = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.2s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # a peer that vanished is noticed within 40 s
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # by default gRPC's reconnect backoff grows to two minutes, longer than a job waits for its client to come back
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


DIRECT: tuple[tuple[str, Any], ...] = (("grpc.enable_http_proxy", 0),)
"""Leaves out the HTTP proxy that gRPC takes from the environment."""


def options_for(address: str) -> tuple[tuple[str, Any], ...]:
    """The options of a channel to a valid address."""
    return (*OPTIONS, *DIRECT) if is_local(address) else OPTIONS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reconnect:
    """How a lost stream is resumed. After `attempts` in a row without a single message, Unavailable is raised.

    The delay before attempt n is first_delay * 2^n seconds, at most `longest_delay`, times a random number from 0.5 to
    1, so that the clients of a server that restarts do not all reconnect at once.
    """

    attempts: int = 8
    first_delay: float = 0.2
    longest_delay: float = 5.0

    def delay(self, attempt: int) -> float:
        return min(self.longest_delay, self.first_delay * 2.0**attempt) * random.uniform(0.5, 1.0)


class Deadline:
    """The deadline of one method, shared by all the calls that it makes. A `timeout` of None means no deadline."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def remaining(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def within(self, seconds: float) -> float:
        """`seconds`, or less if the deadline comes first."""
        left = self.remaining()
        return seconds if left is None else min(seconds, left)
