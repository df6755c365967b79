"""Channel options, deadlines, and the policy for reconnecting a lost stream."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import time
from collections.abc import Mapping
from typing import Any

from omni_grpc.client.address import is_local
from omni_grpc.types.errors import Code, Failure

_log = logging.getLogger(__name__)

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
                "maxAttempts": 5,
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How a call is repeated that the server has no room for now (RESOURCE_EXHAUSTED with RetryInfo: a full queue, a
    rate): after as many seconds as the server says, at most `attempts` times, and not where it says more than `longest`
    seconds or than the deadline leaves. attempts=0: such a call raises at once.
    """

    attempts: int = 5
    longest: float = 60.0

    def pause(self, failure: Failure, attempt: int, deadline: Deadline) -> float | None:
        """Seconds until the call is made again, up to a tenth more than the server says, so that not all come at once;
        None where it is not. `attempt` counts from 0.
        """
        if failure.code is not Code.RESOURCE_EXHAUSTED or failure.retry_after is None or attempt >= self.attempts:
            return None
        pause = failure.retry_after * random.uniform(1.0, 1.1)
        if failure.retry_after > self.longest or pause > deadline.within(pause):
            return None
        _log.info("no room (%s): asking again in %.1f s", failure.reason, pause)
        return pause


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
