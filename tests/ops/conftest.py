"""What the tests of ops share."""

from __future__ import annotations

import secrets

import pytest


@pytest.fixture
def seed() -> int:
    """Inputs are fresh in every run; a failure names their seed."""
    return secrets.randbelow(2**32)
