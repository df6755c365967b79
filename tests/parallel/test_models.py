"""Every registered model on two ranks: what each parallel feature makes is what one process makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni_grpc.request import Request
from omni_grpc.spec import Checkpoint
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.parallel import model_jobs
from tests.parallel.jobs import Work
from tests.parallel.ranks import PAIR, Ranks

pytestmark = pytest.mark.conformance

TOLERANCE = 2e-5
SPLIT_TOKENS = (("sequence_parallel",), ("ulysses", "sequence_parallel"))
SPLIT_WEIGHTS = (("tensor_parallel",),)


class Alone:
    """A model in this process: what is asked of it, and what it makes of that."""

    def __init__(self, name: str, folder: Path) -> None:
        entry = ENTRIES[name]
        model = Model(entry, entry.build(folder))
        self.checkpoint: Checkpoint = model.checkpoint
        self.joins = self._joins(model)
        self.latents, self.work, self.weights = model_jobs.run_model(None, self.checkpoint, (), self.joins)

    @staticmethod
    def _joins(model: Model) -> list[tuple[int, Request]]:
        """Requests and the ticks at which they join: unlike sizes, with and without guidance, the smallest size."""
        size = model.checkpoint.limits.min_size
        drafts = [
            (0, model.draft(width=size, height=size, steps=3)),
            (0, model.guided(wider=1, steps=2, seeds=(1, 2))),
            (1, model.guided(higher=1, steps=2, seeds=(3,), prompt="two blue squares left of a star")),
        ]
        return [(tick, model.request(draft, f"job_{number}")) for number, (tick, draft) in enumerate(drafts)]

    def on(self, ranks: Ranks, features: tuple[str, ...]) -> tuple[list[Work], list[int]]:
        """The same on ranks: what each had to do, and its weights. They agree bit for bit."""
        results: list[tuple[dict[str, Tensor], Work, int]] = ranks.run(
            model_jobs.run_model, self.checkpoint, features, self.joins
        )
        for latents, _, _ in results:
            assert latents.keys() == self.latents.keys()
            for name, expected in self.latents.items():
                torch.testing.assert_close(latents[name], expected, rtol=0, atol=TOLERANCE)
                assert torch.equal(latents[name], results[0][0][name])
        return [work for _, work, _ in results], [weights for _, _, weights in results]


@pytest.fixture(scope="module", params=sorted(ENTRIES))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(request.param, tmp_path_factory.mktemp("checkpoints") / request.param)


@pytest.mark.parametrize("features", SPLIT_TOKENS, ids="+".join)
def test_ranks_that_share_tokens_make_what_one_process_makes(
    alone: Alone, ranks: Ranks, features: tuple[str, ...]
) -> None:
    work, weights = alone.on(ranks, features)
    assert sum(share.queries for share in work) == alone.work.queries
    assert all(share.queries < alone.work.queries for share in work)
    assert weights == [alone.weights] * PAIR


@pytest.mark.parametrize("features", SPLIT_WEIGHTS, ids="+".join)
def test_ranks_that_share_weights_make_what_one_process_makes(
    alone: Alone, ranks: Ranks, features: tuple[str, ...]
) -> None:
    if not alone.checkpoint.spec.tensor_parallel:
        pytest.skip("the model has no table of what can be spread: refused by name, see test_tensor_parallel.py")
    work, weights = alone.on(ranks, features)
    assert [share.queries for share in work] == [alone.work.queries // PAIR] * PAIR
    assert weights[0] == weights[1] < alone.weights
