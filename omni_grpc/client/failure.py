"""Converts the errors of calls and jobs (`google.rpc.Status` and its details) to the exceptions of this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import grpc
from google.rpc import error_details_pb2, status_pb2

from omni_grpc.types.errors import Code, Failure, Violation

_DETAILS = "grpc-status-details-bin"
_CODES: Mapping[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}
# codes that this package never raises -> the closest one that it does; `reason` keeps the original name
_NEAREST: Mapping[str, Code] = {
    "UNAUTHENTICATED": Code.PERMISSION_DENIED,
    "UNKNOWN": Code.INTERNAL,
    "DATA_LOSS": Code.INTERNAL,
}


def from_status(status: status_pb2.Status) -> Failure:
    """The failure that a status describes. Details of unknown types are ignored."""
    name = _CODES.get(status.code, "UNKNOWN")
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


@dataclasses.dataclass(frozen=True, slots=True)
class CallFailure:
    """How a call failed. `from_server` is False if the transport gave up or this client's own deadline passed."""

    failure: Failure
    from_server: bool

    @property
    def lost(self) -> bool:
        """True if the connection was lost, so the job may still run. A reset stream is INTERNAL without any details."""
        if self.failure.code is Code.UNAVAILABLE:
            return True
        return self.failure.code is Code.INTERNAL and not self.from_server and self.failure.reason == "INTERNAL"

    @property
    def timed_out(self) -> bool:
        return self.failure.code is Code.DEADLINE_EXCEEDED and not self.from_server


def from_call(error: grpc.RpcError, address: str) -> CallFailure:
    """How a call to `address` failed, in either gRPC stack. Has the details of the status if the server sent one."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS:
            return CallFailure(from_status(status_pb2.Status.FromString(value)), from_server=True)
    code: grpc.StatusCode = error.code()
    failure = from_status(status_pb2.Status(code=code.value[0], message=error.details() or code.name))
    if failure.code is Code.UNAVAILABLE:
        message = f"cannot reach the server at {address}: {failure.message}"
        failure = dataclasses.replace(failure, reason="SERVER_UNREACHABLE", message=message)
    elif failure.code is Code.DEADLINE_EXCEEDED:
        message = f"the server at {address} did not answer before the deadline of the call"
        failure = dataclasses.replace(failure, reason="CALL_DEADLINE", message=message)
    return CallFailure(failure, from_server=False)
