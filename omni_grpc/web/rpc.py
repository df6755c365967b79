"""Every rpc of the API over Connect and gRPC-Web: the same servicers, another envelope."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from connectrpc.code import Code as ConnectCode
from connectrpc.errors import ConnectError, ErrorDetail
from connectrpc.method import IdempotencyLevel, MethodInfo, StreamType
from connectrpc.request import RequestContext
from connectrpc.server import ConnectASGIApplication, Endpoint
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from protobuf.wkt import Any as Packed

from omni_grpc.server.incoming import GRPC_LIMIT, Incoming
from omni_grpc.server.server import SERVICES, Backend
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import Failure
from omni_grpc.web.answers import name_of, retry_headers
from omni_grpc.web.codecs import Json, Proto, Unread
from omni_grpc.web.connection import Connection
from omni_grpc.wire import to_status


class Rpcs(ConnectASGIApplication[None]):
    """The services of a backend but for those `elsewhere`, as one ASGI application. `connection` is set around each of
    its calls.
    """

    path = "/"

    def __init__(self, backend: Backend, connection: ContextVar[Connection], elsewhere: Collection[type] = ()) -> None:
        self._calls = backend.calls
        self._connection = connection
        self._incoming = Incoming(backend.config.server.max_message_bytes)
        endpoints: dict[str, Any] = {
            f"/{descriptor.full_name}/{method.name}": self._endpoint(method, backend.servicers[kind], kind in elsewhere)
            for descriptor, _, kind in SERVICES
            for method in descriptor.methods
        }
        super().__init__(
            service=None,
            endpoints=lambda _: endpoints,
            read_max_bytes=GRPC_LIMIT * backend.config.server.max_message_bytes,
            codecs=(Proto(), Json()),
        )

    def _endpoint(self, method: MethodDescriptor, servicer: object, elsewhere: bool) -> Endpoint[Any, Any]:
        path = f"/{method.containing_service.full_name}/{method.name}"
        kind = StreamType.UNARY
        if method.client_streaming or method.server_streaming:
            kind = StreamType.CLIENT_STREAM if method.client_streaming else StreamType.SERVER_STREAM
        info = MethodInfo(
            name=method.name,
            service_name=method.containing_service.full_name,
            input=GetMessageClass(method.input_type),
            output=GetMessageClass(method.output_type),
            idempotency_level=IdempotencyLevel.UNKNOWN,
            stream_type=kind,
        )
        handle: Any = getattr(servicer, method.name)
        if elsewhere or path in self._calls.unserved:
            handle = None
        match kind:
            case StreamType.CLIENT_STREAM:
                return Endpoint.client_stream(info, self._upload(path, handle))
            case StreamType.SERVER_STREAM:
                return Endpoint.server_stream(info, self._stream(path, handle))
        return Endpoint.unary(info, self._unary(path, handle))

    def _unary(self, path: str, handle: Any) -> Any:
        async def call(unread: Unread, context: Any) -> Message:
            async with self._call(path, handle, context) as caller:
                message: Message = await handle(self._incoming.message(unread.data, unread.parse), caller)
                return message
            raise AssertionError("`_call` swallows nothing")

        return call

    def _upload(self, path: str, handle: Any) -> Any:
        async def call(parts: AsyncIterator[Unread], context: Any) -> Message:
            async with self._call(path, handle, context) as caller:
                message: Message = await handle(self._messages(parts), caller)
                return message
            raise AssertionError("`_call` swallows nothing")

        return call

    def _stream(self, path: str, handle: Any) -> Any:
        async def call(unread: Unread, context: Any) -> AsyncGenerator[Message]:
            async with self._call(path, handle, context) as caller:
                request = self._incoming.message(unread.data, unread.parse)
                async with aclosing(self._calls.streamed(handle(request, caller))) as messages:
                    async for message in messages:
                        yield message

        return call

    async def _messages(self, parts: AsyncIterator[Unread]) -> AsyncGenerator[Message]:
        async for part in parts:
            yield self._incoming.message(part.data, part.parse)

    @contextlib.asynccontextmanager
    async def _call(self, path: str, handle: Any, context: RequestContext[Any, Any]) -> AsyncIterator[Caller]:
        async def abort(failure: Failure) -> None:
            for name, value in retry_headers(failure).items():
                context.response_headers[name] = value
            raise _error(failure)

        connection = self._connection.get()
        async with self._calls.answering(path, abort, stack=_stack(context)):
            caller = await connection.caller(self._calls, path)
            if handle is None:
                raise self._calls.unavailable(path)
            yield caller


def _stack(context: RequestContext[Any, Any]) -> str:
    return "grpc_web" if context.request_headers.get("content-type", "").startswith("application/grpc") else "connect"


def _error(failure: Failure) -> ConnectError:
    status = to_status(failure)
    # connectrpc has a protobuf of its own, whose messages these are not
    details = [ErrorDetail(Packed(type_url=detail.type_url, value=detail.value)) for detail in status.details]
    return ConnectError(ConnectCode(name_of(failure.code)), status.message, details)
