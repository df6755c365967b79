"""Wraps every call: finds out who makes it, reads its request, turns errors into statuses, and logs the call."""

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

from omni_grpc.config.command_line import meant
from omni_grpc.gate import Gate
from omni_grpc.server.incoming import Incoming, Parse
from omni_grpc.server.tls import client_certificate
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
    with its code and details. `served` and `unserved` name the methods ("/package.Service/Method") of the API, by
    whether this version has them.

    Requests get here as bytes: what gRPC itself refuses has no details.
    """

    def __init__(self, gate: Gate, served: Collection[str], unserved: Collection[str], max_message_bytes: int) -> None:
        self._gate = gate
        self.unserved = unserved
        self._served = served
        self._incoming = Incoming(max_message_bytes)
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
        method = details.method
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(self._refusing(method, self._unknown(method)))
        if not method.startswith(PACKAGE):
            return handler
        if method in self.unserved:
            name = method.removeprefix(PACKAGE)
            refusal = Unimplemented(f"{name} is not yet served", metadata={"method": name})
            return grpc.stream_stream_rpc_method_handler(self._refusing(method, refusal))
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
                self.open_streams += 1
                try:
                    async with aclosing(_generator(handle(request, caller))) as messages:
                        async for message in messages:
                            await _write(context, message)
                finally:
                    self.open_streams -= 1

        return call

    def _refusing(self, method: str, refusal: OmniError) -> Handler:
        """What answers a call of any kind at once, without its requests."""

        async def call(requests: object, context: Any) -> None:
            async with self._call(method, context):
                raise refusal

        return call

    def _unknown(self, method: str) -> Unimplemented:
        if method in self._served:
            message = f"{method.removeprefix(PACKAGE)} is served at the admin address of this server alone"
            return Unimplemented(message, reason="METHOD_ELSEWHERE", metadata={"method": method})
        hint = meant(method, self._served, quoted=False) or "; reflection lists what it has"
        message = f"this server has no method {method}{hint}"
        return Unimplemented(message, reason="METHOD_UNKNOWN", metadata={"method": method})

    @contextlib.asynccontextmanager
    async def _call(self, method: str, context: Any) -> AsyncIterator[Caller]:
        began = time.monotonic()
        outcome = "OK"
        self._calls += 1
        self._idle.clear()
        try:
            yield await self._caller(method, context)
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

    async def _caller(self, method: str, context: Any) -> Caller:
        """Who makes a call. Raises Unauthenticated."""
        # whoever calls what is not there may have written anything in place of its name
        has = method in self._served or method in self.unserved
        return await self._gate.caller(
            method.removeprefix(PACKAGE) if has else "",
            authorization=[value for name, value in context.invocation_metadata() or () if name == "authorization"],
            certificate=client_certificate(context),
            peer=context.peer(),
        )


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


def _generator(messages: AsyncIterator[Message]) -> Any:
    assert inspect.isasyncgen(messages), "streaming handlers are async generators"
    return messages
