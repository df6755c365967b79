"""Brings a request message to the gate."""

from __future__ import annotations

import asyncio

from omni_grpc.gate import Accepted, Gate
from omni_grpc.server.requests import GenerationRequest, read
from omni_grpc.server.tasks import task_of
from omni_grpc.types.caller import Caller

LARGE = 1 << 20
"""Bytes from which a request is read in a thread, so that the events of other jobs do not wait for it."""


async def submit(gate: Gate, caller: Caller, request: GenerationRequest, *, streaming: bool) -> Accepted:
    """Makes a job of a request. Raises every refusal."""
    task = task_of(request)
    gate.intake.check(caller, request.model, task)
    if request.ByteSize() > LARGE:
        ask = await asyncio.to_thread(read, request, task, streaming=streaming)
    else:
        ask = read(request, task, streaming=streaming)
    return await gate.intake.submit(caller, ask)
