"""Wraps every call over gRPC: finds out who makes it, reads its request, turns errors into statuses."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc import aio
from grpc_status import rpc_status

from omni_grpc.server.calls import PACKAGE, Calls, Gone
from omni_grpc.server.incoming import Incoming, Parse
from omni_grpc.server.tls import client_certificate
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import Failure, OmniError
from omni_grpc.wire import to_status

Handler = Any
"""A grpc.RpcMethodHandler, which has no public type of its own for asyncio."""


class Guard(aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps the handlers of our own services; health and reflection pass as they are.

    Handlers get the caller in place of grpc's context. They raise OmniError and need nothing else: the guard answers
    with its code and details.

    Requests get here as bytes: what gRPC itself refuses has no details.
    """

    def __init__(self, calls: Calls, max_message_bytes: int) -> None:
        self._calls = calls
        self._incoming = Incoming(max_message_bytes)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Handler]], details: Any) -> Handler:
        handler = await continuation(details)
        method = details.method
        ours = method.startswith(PACKAGE)
        if handler is None or (ours and method in self._calls.unserved):
            return grpc.stream_stream_rpc_method_handler(self._refusing(method, self._calls.unavailable(method)))
        if not ours:
            return handler
        parse, codec = handler.request_deserializer, (None, handler.response_serializer)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._upload(method, handler.stream_unary, parse), *codec)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._stream(method, handler.unary_stream, parse), *codec)
        return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary, parse), *codec)

    def _unary(self, method: str, handle: Callable[[Message, Caller], Awaitable[Message]], parse: Parse) -> Handler:
        async def call(data: bytes, context: Any) -> Message:
            async with self._call(method, context) as caller:
                return await handle(self._incoming.message(data, parse), caller)
            raise AssertionError("`_call` swallows nothing")

        return call

    def _upload(
        self, method: str, handle: Callable[[AsyncIterator[Message], Caller], Awaitable[Message]], parse: Parse
    ) -> Handler:
        async def call(parts: AsyncIterator[bytes], context: Any) -> Message:
            async with self._call(method, context) as caller:
                return await handle(self._incoming.messages(parts, parse), caller)
            raise AssertionError("`_call` swallows nothing")

        return call

    def _stream(
        self, method: str, handle: Callable[[Message, Caller], AsyncIterator[Message]], parse: Parse
    ) -> Handler:
        async def call(data: bytes, context: Any) -> None:
            # written one by one, so that a call that ends while it waits for the client closes the handler right then
            async with self._call(method, context) as caller:
                request = self._incoming.message(data, parse)
                async with aclosing(self._calls.streamed(_generator(handle(request, caller)))) as messages:
                    async for message in messages:
                        await _write(context, message)

        return call

    def _refusing(self, method: str, refusal: OmniError) -> Handler:
        """What answers a call of any kind at once, without its requests."""

        async def call(requests: object, context: Any) -> None:
            async with self._call(method, context):
                raise refusal

        return call

    @contextlib.asynccontextmanager
    async def _call(self, method: str, context: Any) -> AsyncIterator[Caller]:
        async def abort(failure: Failure) -> None:
            await _abort(context, failure)

        async with self._calls.answering(method, abort, stack="grpc"):
            yield await self._calls.caller(
                method,
                authorization=[value for name, value in context.invocation_metadata() or () if name == "authorization"],
                certificate=client_certificate(context),
                peer=context.peer(),
            )


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


def _generator(messages: AsyncIterator[Message]) -> Any:
    assert inspect.isasyncgen(messages), "streaming handlers are async generators"
    return messages
