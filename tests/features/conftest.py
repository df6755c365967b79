"""The models under test, each with its checkpoint built once for a module."""

from __future__ import annotations

import pytest

from tests.features.suite import Suite
from tests.models.cases import ENTRIES


@pytest.fixture(scope="module", params=sorted(ENTRIES))
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """A model and what features need of it. Its models are shared by the tests of a module: change nothing."""
    return Suite(ENTRIES[request.param], tmp_path_factory.mktemp(request.param))
