"""Failures as OpenAI writes them, with what its clients need to know whether to try again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from omni_grpc.types.errors import Code, Failure
from omni_grpc.web import answers

STATUS: Mapping[Code, int] = {**answers.STATUS, Code.CANCELLED: 409}
STATUS_OF_REASON: Mapping[str, int] = {"MESSAGE_TOO_LARGE": 413, "OUT_OF_MEMORY": 500, "JOB_NOT_FINISHED": 409}
TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
"""Of the field `type`, by status. Other 4xx are invalid_request_error, 5xx are server_error."""


def status_of(failure: Failure) -> int:
    return STATUS_OF_REASON.get(failure.reason, STATUS[failure.code])


def answer(failure: Failure) -> Response:
    """The answer to a call that failed. `x-should-retry` overrules what the official clients do by status."""
    headers = answers.headers_of(failure)
    if not failure.retryable:
        headers["x-should-retry"] = "false"
    if failure.retry_after is not None:
        headers["retry-after-ms"] = str(math.ceil(failure.retry_after * 1000))
    return JSONResponse({"error": error(failure)}, status_of(failure), headers)


def error(failure: Failure) -> dict[str, Any]:
    """The object `error`. `param` is the first field that is wrong, `violations` has all of them."""
    status = status_of(failure)
    first = next(iter(failure.violations), None)
    found: dict[str, Any] = {
        "message": failure.message,
        "type": TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": None if first is None else first.field,
        "code": code_of(failure),
    }
    if len(failure.violations) > 1:
        found["violations"] = [{"param": one.field, "message": one.description} for one in failure.violations]
    if "job_id" in failure.metadata:
        found["job_id"] = failure.metadata["job_id"]
    return found


def code_of(failure: Failure) -> str:
    return failure.reason.lower()
