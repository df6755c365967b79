"""How a call ended: with a failure that the server sent, or with one of the connection."""

from __future__ import annotations

import dataclasses
import re

import grpc
from google.rpc import status_pb2

from omni_grpc.client.address import proxy_note
from omni_grpc.types.errors import Code, Failure
from omni_grpc.wire import from_status

_DETAILS = "grpc-status-details-bin"
_TOO_LARGE = re.compile(r"SERVER: .*larger than max \((\d+) vs\.? \d+\)")
"""What gRPC says for a server of a message that it did not even read."""


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
        message = _with_proxy(f"cannot reach the server at {address}: {failure.message}", address)
        failure = dataclasses.replace(failure, reason="SERVER_UNREACHABLE", message=message)
    elif failure.code is Code.DEADLINE_EXCEEDED:
        message = _with_proxy(f"the server at {address} did not answer before the deadline of the call", address)
        failure = dataclasses.replace(failure, reason="CALL_DEADLINE", message=message)
    elif failure.code is Code.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.search(failure.message)):
        message = (
            f"the request has {sizes[1]} bytes, far more than the server at {address} takes (--max-message-bytes); "
            "send media with `upload`, or ask its operator to raise the limit"
        )
        failure = dataclasses.replace(failure, reason="MESSAGE_TOO_LARGE", message=message)
    return CallFailure(failure, from_server=False)


def _with_proxy(message: str, address: str) -> str:
    """The message and, where calls to the address go through a proxy, which variable names it."""
    note = proxy_note(address)
    return f"{message}; {note}" if note else message
