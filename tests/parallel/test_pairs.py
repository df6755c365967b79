"""Every way to share a model between ranks, and every two of them, alone and beside each feature that knows nothing of
ranks, on one model of each family of blocks: what one process makes, or a refusal by name before a rank is started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from omni_grpc.feature_rules.ranks import check_sizes
from omni_grpc.types.lora import Lora
from omni_grpc.types.step_cache import DbCache
from tests.features.suite import FAMILIES, FIRST, Suite, cosine
from tests.models.cases import ENTRIES
from tests.parallel.alone import ALL_WAYS, GATHERED, ONE_WAY, TWO_WAYS, WEIGHTS, Alone, close, differ
from tests.parallel.beside import BESIDE, EXACT, FLOAT, SAME, Adapted, refusals, refused, same, too_few_heads
from tests.parallel.model_jobs import Features, quantized_layers, run_asleep, run_model, serve
from tests.parallel.ranks import COUNT, PAIR, Ranks

pytestmark = pytest.mark.conformance

INT8: Features = {"quantization": "int8"}
INVARIANT: Features = {"batch_invariant": True}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("checkpoints")
    return Adapted(Suite(ENTRIES[FAMILIES[request.param]], folder), folder)


def crossing(*features: str) -> pytest.MarkDecorator:
    """Every way beside each of these features, each a cell of the table of ranks. `make test-long` runs a cell on one
    family of blocks, the next cell on the next family: each single way beside each feature, and of each two ways those
    beside no feature and every third of the others.
    """
    families, cells = sorted(FAMILIES), []
    for row, way in enumerate(ALL_WAYS):
        for column, feature in enumerate(features):
            often = way in ONE_WAY or feature in ("no feature", "VAE decode") or (row + column) % 3 == 0
            family = families[(row + column) % len(families)]
            marks = pytest.mark.crosses(way, feature), pytest.mark.sampled(family, seldom=not often)
            cells.append(pytest.param(way, feature, marks=marks, id=f"{way}, {feature}"))
    return pytest.mark.parametrize(("way", "feature"), cells)


def turned_down(
    alone: Adapted, way: str, feature: str, features: Features, record: Callable[[str, object], None]
) -> bool:
    """Whether a way is refused beside a feature, by the setting that is expected, before a rank is started."""
    sizes = ALL_WAYS[way]
    expected = refusals(feature, sizes)
    few = too_few_heads(alone, sizes)
    heads = few and not expected
    if heads:
        expected = {"tensor_parallel_size" if sizes.ulysses_degree == 1 else "ulysses_degree": "cannot share"}
    wrong = refused(alone, sizes, features)
    for setting, said in expected.items():
        assert said in wrong.pop(setting)
    assert few or not wrong, wrong
    if expected:
        record("shows", "too few heads" if heads else "refused")
    return bool(expected)


@crossing(*BESIDE)
def test_ranks_make_what_one_process_makes(
    alone: Adapted, ranks: Ranks, way: str, feature: str, record_property: Callable[[str, object], None]
) -> None:
    beside, sizes = BESIDE[feature], ALL_WAYS[way]
    features = beside.settings(alone)
    if turned_down(alone, way, feature, features, record_property):
        return
    if feature == "CUDA graphs":
        # each rank has graphs of its own, which CUDA alone has: tests/parallel/test_on_gpus.py
        record_property("shows", "on GPUs")
        return
    joins, expected = alone.expected(feature)
    results = alone.on(ranks, sizes, joins, features)
    tolerance = beside.close(sizes)
    same(results[0], expected, tolerance)
    assert results[0].reused == expected.reused
    assert any(expected.reused.values()) == (feature == "step cache")
    assert not beside.changes or differ(expected, alone.made)
    if feature == "no feature":
        shares(alone, way, results)
    if feature == "batch invariance":
        for _, request in joins[1:]:
            by_itself = ranks.run(run_model, alone.checkpoint, features, [(0, request)], sizes=sizes)[0]
            assert torch.equal(results[0].latents[request.id], by_itself.latents[request.id])
    record_property("shows", tolerance)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.sampled(sorted(FAMILIES)[row % len(FAMILIES)], seldom=False))
        for row, way in enumerate(ALL_WAYS)
    ],
)
def test_ranks_run_heads_and_tails_and_skip_what_one_process_skips(
    alone: Adapted, ranks: Ranks, way: str, record_property: Callable[[str, object], None]
) -> None:
    """A cache that always runs the first block, goes by what it adds, and forecasts what it leaves out."""
    features: Features = {"cache_backend": "cache_dit"}
    if turned_down(alone, way, "step cache", features, record_property):
        return
    cache = DbCache(
        fn_compute_blocks=1,
        bn_compute_blocks=0,
        max_warmup_steps=2,
        residual_diff_threshold=0.9,
        max_continuous_cached_steps=1,
        max_cached_steps=0,
        taylorseer_order=1,
        cfg_diff_compute_separate=True,
    )
    joins = alone.changed(cache=cache)
    expected = alone.run(features, joins)
    made, *_ = alone.on(ranks, ALL_WAYS[way], joins, features)
    assert made.reused == expected.reused
    assert any(expected.reused.values())
    close(made, expected)
    assert differ(expected, alone.made)


def shares(alone: Alone, way: str, results: list) -> None:
    """Ranks do less each, and have less where they share weights or blocks."""
    sizes = ALL_WAYS[way]
    split = sizes.tensor_parallel_size * sizes.pipeline_parallel_size > 1
    assert all((made.weights < 0.95 * alone.made.weights) == (split or sizes.use_hsdp) for made in results)
    # attention in parts (a ring) is another function than the one that counts its queries
    assert all(made.work.queries < alone.made.work.queries for made in results)


@crossing("CPU offload and sleep")
def test_weights_of_ranks_leave_and_come_back(
    alone: Adapted, ranks: Ranks, way: str, feature: str, record_property: Callable[[str, object], None]
) -> None:
    """Of a rank's own part of them, with the host's memory in the part of the device's."""
    if turned_down(alone, way, feature, {}, record_property):
        return
    for before, after in ranks.run(run_asleep, alone.checkpoint, {}, alone.joins, sizes=ALL_WAYS[way]):
        same(before, alone.made, FLOAT)
        same(after, before, EXACT)
    record_property("shows", FLOAT)


@crossing("VAE decode")
def test_ranks_that_share_anything_decode_together(
    alone: Adapted, ranks: Ranks, way: str, feature: str, record_property: Callable[[str, object], None]
) -> None:
    """Pixels and frames of a worker, from its load to its decode, of two of its ranks."""
    if turned_down(alone, way, feature, {}, record_property):
        return
    request = alone.joins[1][1]
    expected = alone.pixels(request)
    sizes = dataclasses.replace(ALL_WAYS[way], vae_patch_parallel_size=PAIR)
    assert check_sizes(alone.checkpoint, sizes, COUNT) == {}
    made = [pixels for pixels, _ in ranks.run(serve, alone.checkpoint, request, 0.0, sizes=sizes)]
    # each group of so many neighbors decodes the same; the engine asks the first one alone
    assert all(torch.equal(pixels, made[0]) for pixels in made)
    assert (made[0].int() - expected.int()).abs().max() <= 1
    assert expected.float().std() > 1, "there is something to be seen"
    record_property("shows", "1 of 255")


# --- closer than to one process ---------------------------------------------------------------------------------------

KEPT_APART = ("no feature", "step cache", "int8", "fp8", "GGUF", "LoRA", "batch invariance")


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(
            feature,
            marks=[
                pytest.mark.shows(f"HSDP, {feature}", "the same ranks without HSDP", EXACT),
                pytest.mark.sampled(sorted(FAMILIES)[number % len(FAMILIES)]),
            ],
        )
        for number, feature in enumerate(KEPT_APART)
    ],
)
def test_ranks_that_keep_parts_of_weights_compute_the_same(alone: Adapted, ranks: Ranks, feature: str) -> None:
    """Blocks are a part of these tiny models alone, so their weights are not halved."""
    joins, features = alone.expected(feature)[0], BESIDE[feature].settings(alone)
    expected, _ = alone.on(ranks, GATHERED, joins, features)
    made, _ = alone.on(ranks, ONE_WAY["HSDP"], joins, features)
    same(made, expected, EXACT)
    assert made.reused == expected.reused
    assert made.weights < 0.95 * expected.weights


@pytest.mark.shows("CFG parallel, batch invariance", "one process", EXACT)
def test_ranks_that_share_branches_take_the_steps_of_one_process(alone: Adapted, ranks: Ranks) -> None:
    """Where a row does not depend on its batch, nothing else does: guidance and schedules are the same everywhere."""
    joins, expected = alone.expected("batch invariance")
    made, _ = alone.on(ranks, ONE_WAY["CFG parallel"], joins, INVARIANT)
    same(made, expected, EXACT)


@pytest.mark.sampled("single")
@pytest.mark.shows("tensor parallel, int8 and LoRA", "one process", f"cosine {SAME}")
def test_adapters_of_layers_in_int8_that_are_spread(alone: Adapted, ranks: Ranks) -> None:
    joins, features = alone.changed(loras=(Lora(lora_id=FIRST),)), {**INT8, **alone.lora}
    expected = alone.run(features, joins)
    made, *_ = alone.on(ranks, WEIGHTS, joins, features)
    assert differ(made, alone.run(INT8, alone.joins))
    assert all(cosine(made.latents[name], x) > SAME for name, x in expected.latents.items())


@pytest.mark.sampled("dual")
def test_layers_that_are_left_out_of_int8_are_left_out_where_they_are_spread(alone: Adapted, ranks: Ranks) -> None:
    """They can be given by the names of the checkpoint, which know nothing of what is around a layer."""
    ignored: Features = {**INT8, "ignored_layers": ["to_out.0"]}
    whole, fewer = (quantized_layers(None, alone.checkpoint, features) for features in (INT8, ignored))
    assert fewer < whole
    for features, expected in ((INT8, whole), (ignored, fewer)):
        assert ranks.run(quantized_layers, alone.checkpoint, features, sizes=WEIGHTS) == [expected] * PAIR


# --- what is not supported --------------------------------------------------------------------------------------------

APART: dict[str, tuple[dict[str, object], str, str]] = {
    "HSDP x tensor parallel": (
        {"use_hsdp": True, "tensor_parallel_size": 2},
        "use_hsdp",
        "beside tensor_parallel_size",
    ),
    "HSDP x pipeline parallel": (
        {"use_hsdp": True, "pipeline_parallel_size": 2, "ulysses_degree": 2},
        "use_hsdp",
        "beside pipeline_parallel_size",
    ),
    "ring x sequence parallel": (
        {"ring_degree": 2, "sequence_parallel_size": 4},
        "sequence_parallel_size",
        "ulysses_degree x ring_degree is 2; leave it out or give that",
    ),
}


@pytest.mark.sampled("cross")
@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=pytest.mark.shows(pair, "a refusal by name", "before the start")) for pair in APART],
)
def test_two_ways_that_share_the_same_thing_are_refused(
    alone: Adapted, pair: str, record_property: Callable[[str, object], None]
) -> None:
    asked, setting, said = APART[pair]
    wrong = refused(alone, GATHERED.__class__(**asked), {})
    assert list(wrong) == [setting]
    assert said in wrong[setting]
    record_property("shows", "refused")


@pytest.mark.sampled("cross")
@pytest.mark.shows("expert parallel, no experts", "a refusal by name", "before the start")
@pytest.mark.parametrize("way", ALL_WAYS)
def test_experts_that_a_model_does_not_have_are_refused(
    alone: Adapted, way: str, record_property: Callable[[str, object], None]
) -> None:
    """No registered model has experts; tests/parallel/test_expert_parallel.py shares those of a layer."""
    wrong = refused(alone, dataclasses.replace(ALL_WAYS[way], enable_expert_parallel=True), {})
    assert "must be off" in wrong["enable_expert_parallel"]
    record_property("shows", "refused")


def test_the_ways_are_all_pairs() -> None:
    """Of what ranks can share, each two are a way, or refused."""
    names = {"sequence parallel", "Ulysses", "ring", "tensor", "CFG", "pipeline", "HSDP"}
    # of those that share tokens, HSDP is one way with each
    found = {
        frozenset(name.replace(" in a ", " x ").replace(" parallel", "").split(" x ")) for name in (*TWO_WAYS, *APART)
    }
    short = {name.removesuffix(" parallel") for name in names}
    pairs = {frozenset((a, b)) for a in short for b in short if a != b} - {frozenset(("HSDP", "sequence"))}
    assert pairs <= found, pairs - found
