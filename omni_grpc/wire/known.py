"""Messages that stand for one Python value: times, failures and step caches, by their full names.

Values are written as dicts of fields: protobuf fills a field from a dict faster than it copies a message into it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from omni_grpc.types.errors import Failure
from omni_grpc.types.step_cache import METHODS, Calibration, FixedCache, RequestCache, method_of
from omni_grpc.wire.status import from_status, to_status

_NANOS = 1_000_000_000


def duration(seconds: float | None, extra: object = None) -> dict[str, int] | None:
    """A Duration of so many seconds, in whole nanoseconds; unset (None) for None and NaN."""
    if seconds is None or seconds != seconds:
        return None
    nanos = round(seconds * 1e9)
    if nanos < 0:  # both parts carry the sign
        return {"seconds": -(-nanos // _NANOS), "nanos": -(-nanos % _NANOS)}
    return {"seconds": nanos // _NANOS, "nanos": nanos % _NANOS}


def timestamp(seconds: float | None, extra: object = None) -> dict[str, int] | None:
    """A Timestamp of Unix seconds, in whole nanoseconds."""
    if seconds is None:
        return None
    # apart, since today in nanoseconds is a float that is exact to 256 of them: a time that comes back must be the same
    whole = math.floor(seconds)
    carry, nanos = divmod(round((seconds - whole) * 1e9), _NANOS)
    return {"seconds": whole + carry, "nanos": nanos}


def seconds(message: Any) -> float:
    """The seconds of a Duration or the Unix seconds of a Timestamp; 0 for one that is not set."""
    result: float = message.seconds + message.nanos / 1e9
    return result


def _status(failure: Failure | None, extra: object = None) -> Message | None:
    return None if failure is None else to_status(failure)


def _cache_options(value: RequestCache | FixedCache | None, extra: object = None) -> dict[str, Any] | None:
    """`off` for None; unset (None) for a cache that the API has no options for. Records and messages have the same
    names and fields.
    """
    if value is None:
        return {"off": {}}
    if isinstance(value, FixedCache | Calibration):
        return None
    return {method_of(value): {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}}


def _cache(message: Any) -> RequestCache | None:
    kind = message.WhichOneof("kind")
    if kind not in METHODS:
        return None
    record, options = METHODS[kind], getattr(message, kind)
    return record(**{field.name: plain(getattr(options, field.name)) for field in dataclasses.fields(record)})


def plain(value: Any) -> Any:
    """A field that is no message, as records have it: a tuple for a repeated one."""
    return value if isinstance(value, bool | int | float | str) else tuple(value)


WRITE: Mapping[str, Callable[[Any, object], Any]] = {
    "google.protobuf.Duration": duration,
    "google.protobuf.Timestamp": timestamp,
    "google.rpc.Status": _status,
    "omni_grpc.v1.CacheOptions": _cache_options,
}
"""Message type -> what converts a value to its fields, or to the message. Called like every `write.Convert`."""

READ: Mapping[str, Callable[[Any], Any]] = {
    "google.protobuf.Duration": seconds,
    "google.protobuf.Timestamp": seconds,
    "google.rpc.Status": from_status,
    "omni_grpc.v1.CacheOptions": _cache,
}
"""Message type -> what converts a message to its value."""
