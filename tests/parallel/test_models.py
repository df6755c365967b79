"""Every registered model on two ranks: what each parallel feature makes is what one process makes."""

from __future__ import annotations

import pytest

from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.parallel.alone import WAYS, WEIGHTS, Alone, close, spread
from tests.parallel.ranks import PAIR, Ranks

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module", params=sorted(ENTRIES))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    entry = ENTRIES[request.param]
    return Alone(Model(entry, entry.build(tmp_path_factory.mktemp("checkpoints") / request.param)))


@spread("sequence parallel", "Ulysses", like="one process", close="2e-5")
def test_ranks_that_share_tokens_make_what_one_process_makes(alone: Alone, ranks: Ranks, way: str) -> None:
    results = alone.on(ranks, WAYS[way], alone.joins)
    close(results[0], alone.made)
    assert sum(made.work.queries for made in results) == alone.made.work.queries
    assert all(made.work.queries < alone.made.work.queries for made in results)
    assert [made.weights for made in results] == [alone.made.weights] * PAIR


@pytest.mark.shows("tensor parallel", "one process", "2e-5")
def test_ranks_that_share_weights_make_what_one_process_makes(alone: Alone, ranks: Ranks) -> None:
    results = alone.on(ranks, WEIGHTS, alone.joins)
    close(results[0], alone.made)
    assert [made.work.queries for made in results] == [alone.made.work.queries // PAIR] * PAIR
    assert results[0].weights == results[1].weights < alone.made.weights
