"""Scopes, and what exists for whom."""

import pytest

from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import PermissionDenied

READER = Caller(tenant="a", subject="ann", scopes=frozenset({Scope.READ}))


def test_a_missing_scope_is_named_with_what_the_caller_has():
    READER.require(Scope.GENERATE, Scope.READ)
    with pytest.raises(PermissionDenied, match="needs the scope admin; ann of tenant 'a' has read") as refused:
        READER.require(Scope.ADMIN)
    assert (refused.value.reason, refused.value.failure.metadata) == ("SCOPE_MISSING", {"needed": "admin"})


def test_a_tenant_sees_its_own_alone_and_an_admin_everything():
    assert READER.sees == "a"
    assert Caller(scopes=READER.scopes).sees == ""
    assert Caller(tenant="a", scopes=frozenset({Scope.ADMIN})).sees is None


def test_without_identities_everybody_may_do_everything():
    Caller().require(Scope.ADMIN)
    assert Caller().sees is None
