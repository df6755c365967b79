"""The models under test, each built and loaded once."""

from __future__ import annotations

import pytest

from tests.models.cases import ENTRIES
from tests.models.model import Model


@pytest.fixture(scope="module", params=sorted(ENTRIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model on its tiny checkpoint, in float32. Its pipeline is shared by the tests of a module: change nothing."""
    entry = ENTRIES[request.param]
    return Model(entry, entry.build(tmp_path_factory.mktemp("checkpoints") / request.param))
