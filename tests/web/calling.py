"""Calls as browsers make them: Connect and gRPC-Web over HTTP/1.1, written out, so that no library is between."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx2
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

FORMATS = ("connect+proto", "connect+json", "grpc-web+proto")
END = {"connect": 2, "grpc-web": 0x80}


def encoded(message: Message, kind: str) -> bytes:
    return message.SerializeToString() if kind == "proto" else json_format.MessageToJson(message).encode()


def decoded(data: bytes, into: type[Message], kind: str) -> Any:
    return into.FromString(data) if kind == "proto" else json_format.Parse(data, into())


class Refused(Exception):
    """A call that ended in an error: its code, the text and the details by their type's name."""

    def __init__(self, code: str, message: str, details: dict[str, Any]) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.details = code, message, details

    @property
    def reason(self) -> str:
        return self.details["ErrorInfo"].reason

    @property
    def fields(self) -> list[str]:
        return [violation.field for violation in self.details["BadRequest"].field_violations]


async def unary(http: httpx2.AsyncClient, rpc: str, message: Message, into: type[Message], kind: str = "proto") -> Any:
    """A call with one answer, over Connect. Raises Refused."""
    sent = {"content-type": f"application/{kind}"}
    answer = await http.post(f"/omni_grpc.v1.{rpc}", content=encoded(message, kind), headers=sent)
    if answer.status_code != 200:
        raise refused(answer.json())
    assert answer.headers["content-type"] == sent["content-type"]
    return decoded(answer.content, into, kind)


async def stream(
    http: httpx2.AsyncClient, rpc: str, message: Message, into: type[Message], form: str, **headers: str
) -> AsyncIterator[Any]:
    """The messages of a server-streaming call. Raises Refused at its end."""
    protocol, _, kind = form.partition("+")
    data = encoded(message, kind)
    request = http.build_request(
        "POST",
        f"/omni_grpc.v1.{rpc}",
        content=struct.pack(">BI", 0, len(data)) + data,
        headers={"content-type": f"application/{form}"}
        | {name.replace("_", "-"): value for name, value in headers.items()},
    )
    answer = await http.send(request, stream=True)
    try:
        assert answer.status_code == 200, await answer.aread()
        async for flags, part in envelopes(answer.aiter_raw()):
            if flags & END[protocol]:
                ended(protocol, part)
                return
            yield decoded(part, into, kind)
        if protocol == "grpc-web":
            ended(protocol, "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items()).encode())
            return
        raise AssertionError("the stream broke off")
    finally:
        await answer.aclose()


async def envelopes(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    buffer = b""
    async for chunk in chunks:
        buffer += chunk
        while len(buffer) >= 5:
            flags, size = struct.unpack(">BI", buffer[:5])
            if len(buffer) < 5 + size:
                break
            yield flags, buffer[5 : 5 + size]
            buffer = buffer[5 + size :]
    assert buffer == b""


def ended(protocol: str, data: bytes) -> None:
    """Raises Refused where the end of a stream is an error."""
    if protocol == "connect":
        if error := json.loads(data).get("error"):
            raise refused(error)
        return
    trailers = dict(line.split(": ", 1) for line in data.decode().strip().split("\r\n"))
    if trailers["grpc-status"] != "0":
        padded = trailers["grpc-status-details-bin"] + "=="
        status = status_pb2.Status.FromString(base64.b64decode(padded))
        raise Refused(trailers["grpc-status"], status.message, {detail.type_url: detail for detail in status.details})


def refused(error: dict[str, Any]) -> Refused:
    details = {}
    for detail in error.get("details", ()):
        name = detail["type"].rpartition(".")[2]
        details[name] = getattr(error_details_pb2, name).FromString(base64.b64decode(detail["value"] + "=="))
    return Refused(error["code"], error["message"], details)
