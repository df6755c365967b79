"""An HTTP request that is no rpc, under the same rules: a caller, an answer for each error, a line in the log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, runtime_checkable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from omni_grpc.server.calls import Calls, Gone
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import Failure
from omni_grpc.web.answers import answer
from omni_grpc.web.connection import Connection

Handle = Callable[[Request, Caller], Awaitable[Response]]
Identify = Callable[[Request], Awaitable[Caller]]


class Answered(Exception):
    """The call has had its answer."""


@runtime_checkable
class Interruptible(Protocol):
    """A response that can say on its way that it will not be complete."""

    async def interrupted(self, failure: Failure, send: Send) -> None: ...


class Handled:
    """An endpoint of a Starlette application. `method` is the rpc that it comes nearest to, for the audit log and
    the metrics, and `stack` what the latter call this way of calling it.

    `identify` finds out who calls where the request's own headers do not say it; `refuse` makes the answer to a
    failure.
    """

    def __init__(
        self,
        calls: Calls,
        method: str,
        handle: Handle,
        *,
        identify: Identify | None = None,
        refuse: Callable[[Failure], Response] = answer,
        stack: str = "http",
    ) -> None:
        self._calls = calls
        self._method = method
        self._handle = handle
        self._identify = identify or self._by_headers
        self._refuse = refuse
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = told = False
        response: Response | None = None

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        async def abort(failure: Failure) -> None:
            nonlocal told
            # what has begun cannot be taken back: the connection ends before the length that was promised
            if not started:
                await self._refuse(failure)(scope, receive, send)
            elif isinstance(response, Interruptible):
                await response.interrupted(failure, send)
            told = not started or isinstance(response, Interruptible)
            raise Answered

        request = Request(scope, receive, sending)
        name = f"{scope['method']} {scope['path']}"
        try:
            async with (
                self._calls.answering(name, abort, stack=self._stack, rpc=self._method),
                _whose_client_may_leave(),
            ):
                caller = await self._identify(request)
                response = await self._handle(request, caller)
                await response(scope, receive, sending)
        except Answered:
            if not told:
                raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # only the client has left, and nobody awaits an answer

    async def _by_headers(self, request: Request) -> Caller:
        return await Connection.of(request.scope).caller(self._calls, self._method)


@contextlib.asynccontextmanager
async def _whose_client_may_leave() -> AsyncIterator[None]:
    """One that leaves amid its request is no fault of ours."""
    try:
        yield
    except ClientDisconnect:
        raise Gone from None
