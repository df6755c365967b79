"""Wraps every call: finds out who makes it, refuses unknown fields, turns errors into statuses, and logs the call."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc import aio
from grpc_status import rpc_status

from omni_grpc.server.served import refuse_unknown
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import Code, Failure, OmniError, Unimplemented
from omni_grpc.wire import to_status

logger = logging.getLogger(__name__)

Handler = Any
"""A grpc.RpcMethodHandler, which has no public type of its own for asyncio."""

PACKAGE = "/omni_grpc.v1."


class Gone(Exception):
    """The client has left the call."""


class Guard(aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps the handlers of our own services; health and reflection pass as they are.

    Handlers get the caller in place of grpc's context. They raise OmniError and need nothing else: the guard answers
    with its code and details. `unserved` names the
    methods ("/package.Service/Method") that are in the API and not in this version.
    """

    def __init__(self, unserved: Collection[str]) -> None:
        self.unserved = unserved
        self.open_streams = 0
        """Server-streaming calls that have not ended."""
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self, timeout: float) -> None:
        """Returns when no call is open, or after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Handler]], details: Any) -> Handler:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(PACKAGE):
            return handler
        codec = (handler.request_deserializer, handler.response_serializer)
        if details.method in self.unserved:
            return _refusing(handler, codec, self._unserved(details.method))
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._upload(details.method, handler.stream_unary), *codec)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._stream(details.method, handler.unary_stream), *codec)
        return grpc.unary_unary_rpc_method_handler(self._unary(details.method, handler.unary_unary), *codec)

    def _unary(self, method: str, handle: Callable[[Message, Caller], Awaitable[Message]]) -> Handler:
        async def call(request: Message, context: Any) -> Message:
            async with self._call(method, context) as caller:
                refuse_unknown(request)
                return await handle(request, caller)
            raise AssertionError("`_call` swallows nothing")

        return call

    def _upload(self, method: str, handle: Callable[[AsyncIterator[Message], Caller], Awaitable[Message]]) -> Handler:
        async def call(requests: AsyncIterator[Message], context: Any) -> Message:
            async with self._call(method, context) as caller:
                return await handle(_known(requests), caller)
            raise AssertionError("`_call` swallows nothing")

        return call

    def _stream(self, method: str, handle: Callable[[Message, Caller], AsyncIterator[Message]]) -> Handler:
        async def call(request: Message, context: Any) -> None:
            # written one by one, so that a call that ends while it waits for the client closes the handler right then
            async with self._call(method, context) as caller:
                refuse_unknown(request)
                self.open_streams += 1
                try:
                    async with aclosing(_generator(handle(request, caller))) as messages:
                        async for message in messages:
                            await _write(context, message)
                finally:
                    self.open_streams -= 1

        return call

    def _unserved(self, method: str) -> Handler:
        name = method.removeprefix(PACKAGE)

        async def call(request: object, context: Any) -> None:
            async with self._call(method, context):
                raise Unimplemented(f"{name} is not yet served", metadata={"method": name})

        return call

    @contextlib.asynccontextmanager
    async def _call(self, method: str, context: Any) -> AsyncIterator[Caller]:
        began = time.monotonic()
        outcome = "OK"
        self._calls += 1
        self._idle.clear()
        try:
            yield await self._caller(context)
        except OmniError as error:
            outcome = f"{error.failure.code} {error.failure.reason}"
            await _abort(context, error.failure)
        except Gone:
            outcome = "gone"
            raise asyncio.CancelledError from None
        except (Exception, asyncio.CancelledError) as error:  # the one place that answers for what nobody expected
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                outcome = "gone"
                raise
            incident = secrets.token_hex(4)
            outcome = f"{Code.INTERNAL} incident {incident}"
            logger.exception("%s: incident %s", method, incident)
            message = f"an unexpected error in {method.removeprefix(PACKAGE)}; the server's log has incident {incident}"
            await _abort(context, Failure(code=Code.INTERNAL, reason="INTERNAL", message=message))
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()
            logger.info("%s %s in %.3f s", method, outcome, time.monotonic() - began)

    async def _caller(self, context: Any) -> Caller:
        """Who makes a call. Raises Unauthenticated."""
        return Caller(peer=context.peer())


def _is_cancelled() -> bool:
    """Whether the call itself is cancelled. If only something inside it was, the call goes on: its client awaits an
    answer.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _write(context: Any, message: Message) -> None:
    """Sends a message. A call whose client has gone is cancelled, and sometimes a write learns of it first."""
    try:
        await context.write(message)
    except (aio.InternalError, aio.UsageError) as error:
        raise Gone from error


async def _abort(context: Any, failure: Failure) -> None:
    """Ends the call. Always raises."""
    answer = to_status(failure)
    await context.abort(
        grpc.StatusCode[failure.code.name], answer.message, rpc_status.to_status(answer).trailing_metadata
    )


async def _known(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
    """The messages of an upload; one with a field that this server does not know is refused."""
    async for request in requests:
        refuse_unknown(request)
        yield request


def _generator(messages: AsyncIterator[Message]) -> Any:
    assert inspect.isasyncgen(messages), "streaming handlers are async generators"
    return messages


def _refusing(handler: Handler, codec: tuple[Any, Any], call: Handler) -> Handler:
    """A handler of the same kind whose only behavior is `call`."""
    kind = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return kind(call, *codec)
