"""Errors cross the wire without losing anything: the server's mapping and the client's are each other's inverse."""

import grpc
import pytest

from omni_grpc.client.failure import from_call
from omni_grpc.types.errors import Code, Failure, InternalError, Violation
from omni_grpc.wire import from_status, to_status


class Ended(grpc.RpcError):
    """A call that ended, as both stacks show it."""

    def __init__(self, code, details="", trailers=()):
        self._code, self._details, self._trailers = code, details, trailers

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._trailers


@pytest.mark.parametrize("code", Code)
def test_every_code_comes_back_as_its_own_exception(code):
    failure = Failure(
        code=code,
        reason="SOME_REASON",
        message="what went wrong, and the fix",
        violations=(
            Violation("width", "20 is not a multiple of 16"),
            Violation("sampling.steps", "0 is outside 1..200"),
        ),
        retry_after=1.5,
        metadata={"job_id": "job_1"},
    )
    wire = to_status(failure)
    assert from_status(wire) == failure
    ended = from_call(
        Ended(grpc.StatusCode[code.name], "x", [("grpc-status-details-bin", wire.SerializeToString())]), "host:1"
    )
    assert ended.from_server
    error = ended.failure.error()
    assert error.failure == failure
    assert (type(error).code, error.reason, len(error.violations)) == (code, "SOME_REASON", 2)


def test_a_server_that_is_not_there_is_named():
    ended = from_call(Ended(grpc.StatusCode.UNAVAILABLE, "connection refused"), "host:1")
    assert ended.lost
    assert ended.failure.reason == "SERVER_UNREACHABLE"
    assert "host:1" in ended.failure.message
    assert "connection refused" in ended.failure.message


def test_a_reset_stream_is_lost_and_an_internal_error_of_the_server_is_not():
    assert from_call(Ended(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"), "h:1").lost
    wire = to_status(Failure(code=Code.INTERNAL, reason="BUG", message="x")).SerializeToString()
    assert not from_call(Ended(grpc.StatusCode.INTERNAL, "x", [("grpc-status-details-bin", wire)]), "h:1").lost
    assert not from_call(Ended(grpc.StatusCode.UNKNOWN, "x"), "h:1").lost


def test_our_own_deadline_is_told_from_the_job_s():
    assert from_call(Ended(grpc.StatusCode.DEADLINE_EXCEEDED, "x"), "h:1").timed_out
    wire = to_status(Failure(code=Code.DEADLINE_EXCEEDED, reason="RUN_TIMEOUT", message="x")).SerializeToString()
    assert not from_call(
        Ended(grpc.StatusCode.DEADLINE_EXCEEDED, "x", [("grpc-status-details-bin", wire)]), "h:1"
    ).timed_out


def test_codes_of_proxies_keep_their_name_as_the_reason():
    error = from_call(Ended(grpc.StatusCode.DATA_LOSS, "half a message"), "h:1").failure.error()
    assert isinstance(error, InternalError)
    assert error.reason == "DATA_LOSS"
