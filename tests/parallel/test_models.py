"""Every registered model on two ranks: what each parallel feature makes is what one process makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni_grpc.request import Request
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.parallel.model_jobs import Features, Made, run_model
from tests.parallel.ranks import PAIR, Ranks

pytestmark = pytest.mark.conformance

TOLERANCE = 2e-5

GATHERED: Features = {"sequence_parallel": None}
ULYSSES: Features = {"ulysses": None, "sequence_parallel": None}
WEIGHTS: Features = {"tensor_parallel": None}


class Alone:
    """A model in this process, and what is asked of it: unlike sizes, with and without guidance, the smallest size, and
    one request that joins late.
    """

    def __init__(self, name: str, folder: Path) -> None:
        model = Model(ENTRIES[name], ENTRIES[name].build(folder))
        size = model.checkpoint.limits.min_size
        drafts = [
            (0, model.draft(width=size, height=size, steps=4)),
            (0, model.guided(wider=1, steps=5, seeds=(1, 2))),
            (1, model.guided(higher=1, steps=4, seeds=(3,), prompt="two blue squares left of a star")),
        ]
        self.joins: list[tuple[int, Request]] = [
            (tick, model.request(draft, f"job_{number}")) for number, (tick, draft) in enumerate(drafts)
        ]
        self.checkpoint = model.checkpoint
        self.made = run_model(None, self.checkpoint, {}, self.joins)

    def on(self, ranks: Ranks, features: Features) -> list[Made]:
        """What ranks make, who agree bit for bit."""
        results: list[Made] = ranks.run(run_model, self.checkpoint, features, self.joins)
        for made in results:
            assert made.latents.keys() == self.made.latents.keys()
            assert all(torch.equal(x, results[0].latents[name]) for name, x in made.latents.items())
        return results


def close(mine: Made, theirs: Made) -> None:
    for name, expected in theirs.latents.items():
        torch.testing.assert_close(mine.latents[name], expected, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module", params=sorted(ENTRIES))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(request.param, tmp_path_factory.mktemp("checkpoints") / request.param)


@pytest.fixture
def weights(alone: Alone) -> Features:
    if not alone.checkpoint.spec.tensor_parallel:
        pytest.skip("the spec has no table of what can be spread: refused by name, see test_tensor_parallel.py")
    return WEIGHTS


@pytest.mark.parametrize("tokens", [GATHERED, ULYSSES], ids="+".join)
def test_ranks_that_share_tokens_make_what_one_process_makes(alone: Alone, ranks: Ranks, tokens: Features) -> None:
    results = alone.on(ranks, tokens)
    close(results[0], alone.made)
    assert sum(made.work.queries for made in results) == alone.made.work.queries
    assert all(made.work.queries < alone.made.work.queries for made in results)
    assert [made.weights for made in results] == [alone.made.weights] * PAIR


def test_ranks_that_share_weights_make_what_one_process_makes(alone: Alone, ranks: Ranks, weights: Features) -> None:
    results = alone.on(ranks, weights)
    close(results[0], alone.made)
    assert [made.work.queries for made in results] == [alone.made.work.queries // PAIR] * PAIR
    assert results[0].weights == results[1].weights < alone.made.weights
