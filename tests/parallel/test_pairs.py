"""Parallel features with those that know nothing of ranks, on one model of each family of blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
import torch

from omni_grpc.config.roles import Roles, Window
from omni_grpc.feature_rules.ranks import check_sizes
from omni_grpc.types.lora import Lora
from tests.features.suite import FAMILIES, FIRST, SECOND, Suite, cosine
from tests.models.cases import ENTRIES
from tests.parallel.alone import (
    ALL_WAYS,
    BRANCHES,
    CACHE,
    DEEP,
    GATHERED,
    SHARDED,
    WAYS,
    WEIGHTS,
    Alone,
    close,
    differ,
    skips_alike,
    spread,
)
from tests.parallel.model_jobs import Features, quantized_layers, refused, run_model
from tests.parallel.ranks import COUNT, PAIR, Ranks

pytestmark = pytest.mark.conformance

SAME = 0.9999
"""Least cosine of latents in int8 on ranks and in one process, for tiny models with random weights."""

INT8: Features = {"quantization": "int8"}
INVARIANT: Features = {"batch_invariant": True}
OFFLOAD: Features = {"enable_layerwise_offload": True}


class Adapted(Alone):
    """With adapters for the model."""

    def __init__(self, suite: Suite) -> None:
        super().__init__(suite.load())
        self.lora: Features = suite.lora


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(Suite(ENTRIES[FAMILIES[request.param]], tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.sampled
@spread(*DEEP, like="one process", close="2e-5")
def test_ranks_that_share_two_things_make_what_one_process_makes(
    alone: Adapted, ranks: Ranks, way: str, record_property: Callable[[str, object], None]
) -> None:
    """Or it is refused by name, before and after a rank is started, for a tiny model with too few heads."""
    if wrong := check_sizes(alone.checkpoint, DEEP[way], COUNT):
        record_property("shows", "too few heads")
        assert list(wrong) == ["ulysses_degree"]
        for message in ranks.run(refused, alone.checkpoint, {}, sizes=DEEP[way]):
            assert re.search("has [13] heads, which 2 ranks cannot share evenly", message)
        return
    results = alone.on(ranks, DEEP[way], alone.joins)
    close(results[0], alone.made)
    shared = DEEP[way].tensor_parallel_size * DEEP[way].pipeline_parallel_size > 1
    assert all((made.weights < alone.made.weights) == shared for made in results)
    assert all(made.work.queries < alone.made.work.queries for made in results)


KEPT_APART: Mapping[str, Features | None] = {
    "HSDP": {},
    "HSDP x int8": INT8,
    "HSDP x step cache": CACHE,
    "HSDP x LoRA": None,
}
"""Features beside sharded weights; None: adapters, which belong to a model."""


@pytest.mark.sampled
@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=pytest.mark.shows(what, "sequence parallel", "bit for bit")) for what in KEPT_APART],
)
def test_ranks_that_keep_parts_of_weights_compute_the_same(alone: Adapted, ranks: Ranks, what: str) -> None:
    """Blocks are a part of these tiny models alone, so their weights are not halved."""
    features = KEPT_APART[what]
    joins = alone.half_cached() if features is CACHE else alone.joins
    if features is None:
        features, joins = alone.lora, alone.changed(loras=(Lora(lora_id=FIRST),))
    expected, _ = alone.on(ranks, GATHERED, joins, features)
    made, _ = alone.on(ranks, SHARDED, joins, features)
    assert all(torch.equal(made.latents[name], x) for name, x in expected.latents.items())
    assert made.reused == expected.reused
    assert made.weights < 0.95 * expected.weights


@spread(*BRANCHES, like="one process", close="2e-5")
def test_ranks_that_share_branches_make_what_one_process_makes(alone: Adapted, ranks: Ranks, way: str) -> None:
    """Requests with and without guidance, of two outputs and of one, which join and leave."""
    results = alone.on(ranks, BRANCHES[way], alone.joins)
    close(results[0], alone.made)
    assert all(0 < made.work.queries < alone.made.work.queries for made in results)


@pytest.mark.shows("CFG parallel x batch invariance", "one process", "bit for bit")
def test_ranks_that_share_branches_take_the_steps_of_one_process(alone: Adapted, ranks: Ranks) -> None:
    """Where a row does not depend on its batch, nothing else does: guidance and schedules are the same everywhere."""
    made, _ = alone.on(ranks, BRANCHES["CFG parallel"], alone.joins, INVARIANT)
    expected = alone.run(INVARIANT, alone.joins)
    assert all(torch.equal(made.latents[name], x) for name, x in expected.latents.items())


@pytest.mark.shows("batch invariance x tensor parallel", "each request alone", "bit for bit")
def test_ranks_give_a_request_the_same_bits_in_any_batch(alone: Adapted, ranks: Ranks) -> None:
    together, _ = alone.on(ranks, WEIGHTS, alone.joins, INVARIANT)
    for _, request in alone.joins[1:]:
        by_itself = ranks.run(run_model, alone.checkpoint, INVARIANT, [(0, request)], sizes=WEIGHTS)[0]
        assert torch.equal(together.latents[request.id], by_itself.latents[request.id])


@pytest.mark.sampled
@spread(*ALL_WAYS, like="one process", close="same decisions, 2e-5", also="step cache")
def test_ranks_skip_the_rows_that_one_process_skips(
    alone: Adapted, ranks: Ranks, way: str, record_property: Callable[[str, object], None]
) -> None:
    if check_sizes(alone.checkpoint, ALL_WAYS[way], COUNT):
        record_property("shows", "too few heads")
        return
    skips_alike(alone, ranks, way)


@pytest.mark.sampled
@spread(
    *WAYS,
    "tensor x sequence parallel",
    "CFG parallel",
    "pipeline parallel",
    like="one process",
    close="2e-5",
    also="LoRA",
)
def test_adapters_change_what_a_rank_has(alone: Adapted, ranks: Ranks, way: str) -> None:
    joins = alone.changed(loras=(Lora(lora_id=FIRST), Lora(lora_id=SECOND, scale=-0.5)))[:2] + alone.joins[2:]
    made, *_ = alone.on(ranks, ALL_WAYS[way], joins, alone.lora)
    close(made, alone.run(alone.lora, joins))
    assert differ(made, alone.made)


@pytest.mark.sampled
@spread(*WAYS, like="one process", close="2e-5", also="attention by step")
def test_rows_whose_attention_differs_in_precision_are_computed_apart_by_every_rank(
    alone: Adapted, ranks: Ranks, way: str
) -> None:
    """In float64 in the second half of the steps, so that requests that join late differ from the others."""
    chosen: Features = {"roles": Roles(schedule=(Window(precision="float64", steps=(0.5, 1.0)),))}
    made, *_ = alone.on(ranks, WAYS[way], alone.joins, chosen)
    expected = alone.run(chosen, alone.joins)
    close(made, expected)
    assert not all(torch.equal(x, alone.made.latents[name]) for name, x in expected.latents.items())


SUMMED = ("tensor parallel", "tensor x sequence parallel", "ring", "CFG parallel", "pipeline parallel")
"""Ways in which something is summed, or computed in other batches, than in one process."""


@spread("sequence parallel", "Ulysses", like="one process", close="bit for bit", also="int8")
def test_the_tokens_that_a_rank_has_can_be_in_int8(alone: Adapted, ranks: Ranks, way: str) -> None:
    expected = alone.run(INT8, alone.joins)
    made, *_ = alone.on(ranks, WAYS[way], alone.joins, INT8)
    assert differ(made, alone.made)
    assert all(torch.equal(made.latents[name], x) for name, x in expected.latents.items())


@pytest.mark.sampled
@spread(*SUMMED, like="one process", close="cosine 0.9999", also="int8")
def test_the_layers_that_a_rank_has_can_be_in_int8(alone: Adapted, ranks: Ranks, way: str) -> None:
    """Scales are those of one process, so its codes are the same until a sum over ranks rounds otherwise: then a value
    between two codes may take the other one.
    """
    expected = alone.run(INT8, alone.joins)
    made, *_ = alone.on(ranks, ALL_WAYS[way], alone.joins, INT8)
    assert differ(made, alone.made)
    assert all(cosine(made.latents[name], x) > SAME for name, x in expected.latents.items())


@pytest.mark.shows("int8 x LoRA x tensor parallel", "one process", "cosine 0.9999")
def test_adapters_of_layers_in_int8_that_are_spread(alone: Adapted, ranks: Ranks) -> None:
    joins, features = alone.changed(loras=(Lora(lora_id=FIRST),)), {**INT8, **alone.lora}
    expected = alone.run(features, joins)
    made, *_ = alone.on(ranks, WEIGHTS, joins, features)
    assert differ(made, alone.run(INT8, alone.joins))
    assert all(cosine(made.latents[name], x) > SAME for name, x in expected.latents.items())


def test_layers_that_are_left_out_of_int8_are_left_out_where_they_are_spread(alone: Adapted, ranks: Ranks) -> None:
    """They can be given by the names of the checkpoint, which know nothing of what is around a layer."""
    ignored: Features = {**INT8, "ignored_layers": ["to_out.0"]}
    whole, fewer = (quantized_layers(None, alone.checkpoint, features) for features in (INT8, ignored))
    assert fewer < whole
    for features, expected in ((INT8, whole), (ignored, fewer)):
        assert ranks.run(quantized_layers, alone.checkpoint, features, sizes=WEIGHTS) == [expected] * PAIR


@pytest.mark.sampled
@spread(*ALL_WAYS, like="one process", close="2e-5", also="layerwise offload")
def test_the_layers_that_a_rank_has_can_be_on_the_host(
    alone: Adapted, ranks: Ranks, way: str, record_property: Callable[[str, object], None]
) -> None:
    if check_sizes(alone.checkpoint, ALL_WAYS[way], COUNT):
        record_property("shows", "too few heads")
        return
    made, *_ = alone.on(ranks, ALL_WAYS[way], alone.joins, OFFLOAD)
    close(made, alone.made)
