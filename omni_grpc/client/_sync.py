"""Where the synchronous client differs from the asyncio one. `_async` has the same functions for the latter."""

from __future__ import annotations

import time
from typing import Any

import grpc

from omni_grpc.client.channel import options_for
from omni_grpc.client.credentials import Credentials


def open_channel(address: str, credentials: Credentials) -> Any:
    if credentials.tls is None:
        return credentials.authorized(grpc.insecure_channel(address, options=options_for(address)))
    return credentials.authorized(grpc.secure_channel(address, credentials.tls, options=options_for(address)))


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def refusal_was_lost(error: grpc.RpcError) -> bool:
    """Always False: this gRPC stack reports the server's own reason."""
    return False


def cancel_reason(error: BaseException | None) -> str:
    """The reason recorded with a job that is cancelled because its stream was left with `error`."""
    # an interrupt that says more than Ctrl-C does, such as the name of a signal, is taken by its word
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted by the user"
    return "the client left the stream"
