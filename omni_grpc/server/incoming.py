"""The bytes of a request, before they are a message: what is too large or is none is refused like any wrong field."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.message import DecodeError, Message

from omni_grpc.server.served import refuse_unknown
from omni_grpc.types.errors import InvalidArgument, ResourceExhausted, Violation

Parse = Callable[[bytes], Message]

GRPC_LIMIT = 2
"""How many times the limit of a message gRPC lets in. What is above that it refuses before it is read, and without
details; what is below gets here.
"""


class Incoming:
    """Parses the messages of requests, whose handlers get their bytes."""

    def __init__(self, max_message_bytes: int) -> None:
        self._most = max_message_bytes

    def message(self, data: bytes, parse: Parse) -> Message:
        """The message. Raises ResourceExhausted (MESSAGE_TOO_LARGE) for one above the limit, InvalidArgument for bytes
        that are no such message (MALFORMED_MESSAGE) and for fields that this server does not know.
        """
        if len(data) > self._most:
            raise ResourceExhausted(
                f"the message has {len(data)} bytes; the largest that this server takes has {self._most} "
                "(--max-message-bytes); send media with UploadAsset, or start the server with a higher limit",
                reason="MESSAGE_TOO_LARGE",
                metadata={"size_bytes": str(len(data)), "max_message_bytes": str(self._most)},
            )
        try:
            message = parse(data)
        except DecodeError as error:
            rule = (
                f"its {len(data)} bytes are no {_name(parse)}: wrong wire format, or text that is not UTF-8; "
                "compare the client's .proto files with those of the server"
            )
            raise InvalidArgument(
                f"the request cannot be read: {rule}",
                reason="MALFORMED_MESSAGE",
                violations=(Violation("request", rule),),
            ) from error
        refuse_unknown(message)
        return message

    async def messages(self, parts: AsyncIterator[bytes], parse: Parse) -> AsyncIterator[Message]:
        """The messages of an upload."""
        async for data in parts:
            yield self.message(data, parse)


def _name(parse: Any) -> str:
    """The type that a message's own FromString reads."""
    return str(parse.__self__.DESCRIPTOR.full_name)
