"""A failure as an HTTP answer: status, headers and JSON, as Connect has it (https://connectrpc.com/docs/protocol)."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from omni_grpc.types.errors import Code, Failure
from omni_grpc.wire import to_status

STATUS: Mapping[Code, int] = {
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 416,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}


def answer(failure: Failure) -> Response:
    """The answer to a call that failed."""
    status = to_status(failure)
    details = [
        {
            "type": detail.type_url.rpartition("/")[2],
            "value": base64.b64encode(detail.value).decode().rstrip("="),
        }
        for detail in status.details
    ]
    content: dict[str, Any] = {"code": name_of(failure.code), "message": status.message, "details": details}
    return JSONResponse(content, STATUS[failure.code], headers_of(failure))


def headers_of(failure: Failure) -> dict[str, str]:
    """Those that HTTP has for what a failure says."""
    headers = {"cache-control": "no-store", **retry_headers(failure)}
    if failure.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return headers


def retry_headers(failure: Failure) -> dict[str, str]:
    """When to come back, in whole seconds, none of them too early."""
    return {} if failure.retry_after is None else {"retry-after": str(math.ceil(failure.retry_after))}


def name_of(code: Code) -> str:
    """As Connect writes it."""
    return "canceled" if code is Code.CANCELLED else code.name.lower()
