"""The two things that can be said about an input: why it is refused, and how it was converted."""

from __future__ import annotations

from omni_grpc.types.errors import InvalidArgument, Violation
from omni_grpc.types.results import RequestWarning

EMPTY = "INPUT_EMPTY"
HASH_MISMATCH = "INPUT_HASH_MISMATCH"
TOO_LARGE = "INPUT_TOO_LARGE"
TYPE_MISMATCH = "INPUT_TYPE_MISMATCH"
UNREADABLE = "INPUT_UNREADABLE"
UNSUPPORTED = "INPUT_NOT_SUPPORTED"
URI_REFUSED = "URI_NOT_ALLOWED"

Warnings = tuple[RequestWarning, ...]


def refusal(field: str, reason: str, description: str) -> InvalidArgument:
    """The error for the input at that path of the request."""
    violation = Violation(field, description)
    return InvalidArgument(f"{field}: {description}", reason=reason, violations=(violation,))


def converted(field: str, message: str, requested: str = "", applied: str = "") -> RequestWarning:
    return RequestWarning(code="INPUT_CONVERTED", field=field, message=message, requested=requested, applied=applied)
