"""The two things that can be said about an input: why it is refused, and how it was converted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

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


@contextlib.contextmanager
def faults_of(field: str, kind: str) -> Iterator[None]:
    """Whatever goes wrong in here, while a file of that kind is read, is the file's fault: a decoder raises anything on
    broken bytes. Raises InvalidArgument that names the field and the kind, or MemoryError, which is nobody's fault yet.
    """
    try:
        yield
    except InvalidArgument as error:
        found = tuple(Violation(v.field, f"{v.description} (it is {kind})") for v in error.violations)
        raise InvalidArgument(f"{error} (it is {kind})", reason=error.reason, violations=found) from error
    except MemoryError:
        raise
    except Exception as error:
        why = getattr(error, "strerror", None) or error
        rule = f"is a {kind} that cannot be read: {why}; it is broken or cut off, send it again"
        raise refusal(field, UNREADABLE, rule) from error


def converted(field: str, message: str, requested: str = "", applied: str = "") -> RequestWarning:
    return RequestWarning(code="INPUT_CONVERTED", field=field, message=message, requested=requested, applied=applied)


def together(refusals: Sequence[InvalidArgument]) -> InvalidArgument:
    """One error for all inputs that are refused, with the reason of the first."""
    violations = tuple(violation for error in refusals for violation in error.violations)
    return InvalidArgument("; ".join(map(str, refusals)), reason=refusals[0].reason, violations=violations)
