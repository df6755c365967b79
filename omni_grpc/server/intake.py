"""Brings a request message to the gate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

from omni_grpc.gate import Accepted, Ask, Gate
from omni_grpc.server.requests import GenerationRequest, read
from omni_grpc.server.tasks import task_of
from omni_grpc.types.caller import Caller

T = TypeVar("T")

LARGE = 1 << 20
"""Bytes from which a request is read in a thread, so that the events of other jobs do not wait for it."""


async def submit(gate: Gate, caller: Caller, request: GenerationRequest, *, streaming: bool) -> Accepted:
    """Makes a job of a request. Raises every refusal."""
    return await gate.intake.submit(caller, await asked(gate, caller, request, streaming=streaming))


async def asked(gate: Gate, caller: Caller, request: GenerationRequest, *, streaming: bool) -> Ask:
    """What a request asks for. Raises what is known without a look at the whole of it, and what cannot be read."""
    task = task_of(request)
    gate.intake.check(caller, request.model, task)
    return await aside(request, lambda: read(request, task, streaming=streaming))


async def aside(message: Message, work: Callable[[], T]) -> T:
    """Work on a message, in a thread where it is large."""
    return await asyncio.to_thread(work) if message.ByteSize() > LARGE else work()
