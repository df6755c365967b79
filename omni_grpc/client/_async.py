"""Where the asyncio client differs from the synchronous one. `_sync` has the same functions for the latter."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from omni_grpc.client.channel import options_for
from omni_grpc.client.credentials import Credentials

REFUSED_WHILE_SENDING = "Internal error from Core"
"""What grpc.aio reports when the server refuses a request stream that is still being sent."""


def open_channel(address: str, credentials: Credentials) -> Any:
    """A grpc.aio channel. Raises RuntimeError outside a running event loop, which grpc.aio would notice much later."""
    asyncio.get_running_loop()
    if credentials.tls is None:
        return credentials.authorized(grpc.aio.insecure_channel(address, options=options_for(address)))
    return credentials.authorized(grpc.aio.secure_channel(address, credentials.tls, options=options_for(address)))


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


def refusal_was_lost(error: grpc.RpcError) -> bool:
    """True if the server refused an upload but its reason did not get through, so that a repeated call may tell it."""
    return bool(error.details() == REFUSED_WHILE_SENDING)


def cancel_reason(error: BaseException | None) -> str:
    """The reason recorded with a job that is cancelled because its stream was left with `error`."""
    task_cancelled = isinstance(error, asyncio.CancelledError)
    return "the client's task was cancelled" if task_cancelled else "the client left the stream"
