"""Which page of a list a message asks for."""

from __future__ import annotations

from google.protobuf.message import Message

from omni_grpc.gate import PageRequest


def asked_page(request: Message) -> PageRequest:
    """`request` has the fields page_size and page_token. Its tokens are bound to its other fields, the filters."""
    bare = type(request)()
    bare.CopyFrom(request)
    bare.ClearField("page_size")
    bare.ClearField("page_token")
    size, token = request.page_size, request.page_token  # type: ignore[attr-defined]
    return PageRequest(size, token, bare.SerializeToString(deterministic=True))
