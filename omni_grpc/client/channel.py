"""How channels are set up, the clock of a call, and how often a lost stream is taken up again."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Mapping
from typing import Any

from omni_grpc.types.errors import InvalidArgument, Violation

UNARY_TIMEOUT = 30.0
"""Seconds that a call which does not stream may take, its retries included."""

CANCEL_TIMEOUT = 5.0
"""Seconds that a caller who leaves waits for the server to take the cancel, and for the job to stop."""

# UNAVAILABLE before the first message is retried by gRPC itself. That is safe for every rpc that this client calls:
# those that make a job carry a request_id, the others read or are idempotent.
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
    # a peer that went without a word is noticed within 40 s
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC's own pause between connections grows to two minutes, longer than a job waits for its client to come back
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def check_address(address: str) -> str:
    """The address, or InvalidArgument where it has no port: gRPC would silently take 443."""
    if ":" in address:
        return address
    rule = f"{address!r} has no port; write {address or 'localhost'}:50051"
    raise InvalidArgument(f"address {rule}", violations=(Violation("address", rule),))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reconnect:
    """How a lost stream is taken up again: `attempts` in a row without a single message, then Unavailable is raised.

    The pause before attempt n is first_delay * 2^n seconds, at most `longest_delay`, times a random number from 0.5 to
    1, so that the clients of a server that restarts do not come back all at once.
    """

    attempts: int = 8
    first_delay: float = 0.2
    longest_delay: float = 5.0

    def delay(self, attempt: int) -> float:
        return min(self.longest_delay, self.first_delay * 2.0**attempt) * random.uniform(0.5, 1.0)


class Deadline:
    """The end of the caller's patience, over all the calls that one method makes. None: no end."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def remaining(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def within(self, seconds: float) -> float:
        """`seconds`, or less where the deadline comes first."""
        left = self.remaining()
        return seconds if left is None else min(seconds, left)
