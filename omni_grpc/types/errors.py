"""What can go wrong, in one vocabulary: every error has a canonical code, a stable reason and a message with the fix.

The codes are gRPC's canonical status codes by name, so that the server can answer with them and the worker, which must
not import grpc, can still raise them. `Failure` is the picklable form that crosses the process boundary.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import ClassVar


class Code(enum.StrEnum):
    """Canonical status codes (https://grpc.io/docs/guides/status-codes/), by name."""

    CANCELLED = "CANCELLED"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    UNAUTHENTICATED = "UNAUTHENTICATED"


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    """One field that broke one rule. `field` is a path as the user wrote it, for example `sampling.num_outputs`."""

    field: str
    description: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error as data: it crosses pipes, is stored in job records and becomes a `google.rpc.Status`.

    `reason` is an UPPER_SNAKE identifier that clients may branch on; `retry_after` is in seconds.
    """

    code: Code
    reason: str
    message: str
    violations: tuple[Violation, ...] = ()
    retry_after: float | None = None
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def retryable(self) -> bool:
        """True where the same request may succeed later, unchanged."""
        return self.code is Code.UNAVAILABLE or self.retry_after is not None

    def error(self) -> OmniError:
        """The exception to raise for this failure."""
        return _BY_CODE[self.code](
            self.message,
            reason=self.reason,
            violations=self.violations,
            retry_after=self.retry_after,
            metadata=self.metadata,
        )


class OmniError(Exception):
    """Base of every error that omni_grpc raises on purpose. Subclasses fix the code; `reason` narrows it."""

    code: ClassVar[Code] = Code.INTERNAL
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        violations: tuple[Violation, ...] = (),
        retry_after: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.failure = Failure(
            code=self.code,
            reason=reason or self.default_reason,
            message=message,
            violations=violations,
            retry_after=retry_after,
            metadata=dict(metadata or {}),
        )

    @property
    def reason(self) -> str:
        return self.failure.reason

    @property
    def violations(self) -> tuple[Violation, ...]:
        return self.failure.violations

    def __reduce__(self) -> tuple[object, ...]:
        return (Failure.error, (self.failure,))


class InvalidArgument(OmniError):
    """The request breaks a rule, whatever the state of the server. Names the field, its value, the rule and the nearest
    valid value.
    """

    code = Code.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"


class NotFound(OmniError):
    """No such model, job or artifact."""

    code = Code.NOT_FOUND
    default_reason = "NOT_FOUND"


class FailedPrecondition(OmniError):
    """Well formed, but this server as it is configured cannot do it (a task that the model lacks, for example)."""

    code = Code.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class ResourceExhausted(OmniError):
    """The queue is full, a quota is spent, or memory ran out."""

    code = Code.RESOURCE_EXHAUSTED
    default_reason = "RESOURCE_EXHAUSTED"


class Unavailable(OmniError):
    """Not now: the server is draining or its worker is being restarted. Safe to retry."""

    code = Code.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DeadlineExceeded(OmniError):
    """A time limit of the job passed."""

    code = Code.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class OperationCancelled(OmniError):
    """The job was stopped on request."""

    code = Code.CANCELLED
    default_reason = "CANCELLED"


class Aborted(OmniError):
    """A concurrent or earlier call conflicts with this one (the same request_id with another body)."""

    code = Code.ABORTED
    default_reason = "ABORTED"


class AlreadyExists(OmniError):
    """The thing to create already exists."""

    code = Code.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class OutOfRange(OmniError):
    """An offset or sequence number outside the range that is kept."""

    code = Code.OUT_OF_RANGE
    default_reason = "OUT_OF_RANGE"


class PermissionDenied(OmniError):
    """The caller may not do this."""

    code = Code.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class Unauthenticated(OmniError):
    """Nobody knows who the caller is: no credentials, or ones that are not valid."""

    code = Code.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class Unimplemented(OmniError):
    """Designed and documented, but not served by this version."""

    code = Code.UNIMPLEMENTED
    default_reason = "NOT_YET_SERVED"


class InternalError(OmniError):
    """A bug of ours. The message says what was being done; the log has the traceback."""


_BY_CODE: Mapping[Code, type[OmniError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        NotFound,
        FailedPrecondition,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        OperationCancelled,
        Aborted,
        AlreadyExists,
        OutOfRange,
        PermissionDenied,
        Unauthenticated,
        Unimplemented,
        InternalError,
    )
}


class ConfigError(OmniError):
    """A setting that is unknown, has the wrong type, or cannot work on this machine. Raised at startup, never later."""

    code = Code.INVALID_ARGUMENT
    default_reason = "BAD_CONFIGURATION"


class CheckpointError(OmniError):
    """A checkpoint that cannot be served: a missing file, or missing or unexpected weights, each by name."""

    code = Code.FAILED_PRECONDITION
    default_reason = "BAD_CHECKPOINT"
