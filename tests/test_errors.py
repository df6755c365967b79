import inspect
import pickle

import pytest

from omni_grpc.types import errors
from omni_grpc.types.errors import Code, Failure, InvalidArgument, OmniError, Unavailable, Violation

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, OmniError)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_survive_a_process_boundary_with_code_reason_and_violations(kind):
    error = kind("no", reason="R", violations=(Violation("f", "d"),), retry_after=2.0, metadata={"k": "v"})
    again = pickle.loads(pickle.dumps(error))
    assert again.failure == error.failure
    assert str(again) == "no"


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_an_exception(code):
    error = Failure(code=code, reason="R", message="m").error()
    assert error.code is code


def test_only_what_may_succeed_later_is_retryable():
    assert Unavailable("x").failure.retryable
    assert InvalidArgument("x", retry_after=1.0).failure.retryable
    assert not InvalidArgument("x").failure.retryable
