"""A `Failure` and the status that a client reads: google.rpc.Status with typed details (https://google.aip.dev/193).

A status travels in the trailers of a call, and clients drop trailers beyond 8 KiB. What a client wrote can be part of a
message, at any length, so everything here is cut to a budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from omni_grpc.types.errors import Code, Failure, Violation

DOMAIN = "omni_grpc"
MESSAGE_BYTES = 768
"""Longest message, in UTF-8. It travels percent-encoded too, which takes up to three times as much."""
DETAILS_BYTES = 3072
"""Most that the whole status takes, before base64."""
TEXT_BYTES = 256
"""Longest single text inside of the details."""


_NAMES: Mapping[int, str] = {number: name for name, number in code_pb2.Code.items()}
# codes that this package never raises, by the one that is nearest; `reason` keeps the name
_NEAREST: Mapping[str, Code] = {
    "UNKNOWN": Code.INTERNAL,
    "DATA_LOSS": Code.INTERNAL,
}


def to_status(failure: Failure) -> status_pb2.Status:
    """The failure as google.rpc.Status: ErrorInfo always, then what fits its code, cut to DETAILS_BYTES."""
    code = code_pb2.Code.Value(failure.code.name)
    result = status_pb2.Status(code=code, message=clip(failure.message, MESSAGE_BYTES))
    info = error_details_pb2.ErrorInfo(reason=failure.reason, domain=DOMAIN)
    for key, value in failure.metadata.items():
        info.metadata[key] = clip(value, TEXT_BYTES)
    result.details.add().Pack(info)
    if failure.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(failure.retry_after * 1e9))
        result.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if failure.violations:
        result.details.add().Pack(_bad_request(failure, DETAILS_BYTES - result.ByteSize()))
    if (detail := _DETAILS.get(failure.code)) is not None:
        result.details.add().Pack(detail(failure))
    return result


def from_status(status: status_pb2.Status) -> Failure:
    """The failure that a status describes. Details of kinds that are not known here are passed over."""
    name = _NAMES.get(status.code, "UNKNOWN")
    code = _NEAREST.get(name) or Code(name)
    failure = Failure(code=code, reason=name, message=status.message)
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            failure = dataclasses.replace(failure, reason=info.reason or name, metadata=dict(info.metadata))
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            found = error_details_pb2.BadRequest.FromString(detail.value).field_violations
            violations = tuple(Violation(one.field, one.description) for one in found)
            failure = dataclasses.replace(failure, violations=violations)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
            failure = dataclasses.replace(failure, retry_after=delay.seconds + delay.nanos / 1e9)
    return failure


def clip(text: str, most: int) -> str:
    """The text, or its beginning and an ellipsis where it takes more than `most` bytes of UTF-8."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    return encoded[: most - 3].decode(errors="ignore") + "..."


def _bad_request(failure: Failure, budget: int) -> error_details_pb2.BadRequest:
    """Field by field while there is room; the last entry says how many there was none for."""
    result = error_details_pb2.BadRequest()
    room = budget - 2 * TEXT_BYTES
    for index, violation in enumerate(failure.violations):
        entry = error_details_pb2.BadRequest.FieldViolation(
            field=clip(violation.field, TEXT_BYTES),
            description=clip(violation.description, TEXT_BYTES),
            reason=failure.reason,
        )
        if result.ByteSize() + entry.ByteSize() > room:
            rest = len(failure.violations) - index
            result.field_violations.add(description=f"{rest} more fields, omitted because the list is too long")
            break
        result.field_violations.append(entry)
    return result


def _resource(failure: Failure) -> Any:
    return error_details_pb2.ResourceInfo(
        resource_type=failure.reason.removesuffix("_NOT_FOUND").lower(),
        resource_name=clip(failure.metadata.get("name", ""), TEXT_BYTES),
        description=clip(failure.message, TEXT_BYTES),
    )


def _precondition(failure: Failure) -> Any:
    result = error_details_pb2.PreconditionFailure()
    result.violations.add(type=failure.reason, description=clip(failure.message, TEXT_BYTES))
    return result


def _quota(failure: Failure) -> Any:
    result = error_details_pb2.QuotaFailure()
    result.violations.add(subject=failure.reason, description=clip(failure.message, TEXT_BYTES))
    return result


_DETAILS: Mapping[Code, Callable[[Failure], Any]] = {
    Code.NOT_FOUND: _resource,
    Code.FAILED_PRECONDITION: _precondition,
    Code.RESOURCE_EXHAUSTED: _quota,
}
