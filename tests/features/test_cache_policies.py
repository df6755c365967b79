"""What each step cache decides and answers, on a made-up stack, against the algorithm by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from omni_grpc.config import DIFFUSERS_CACHES, NATIVE_CACHES, CacheConfig, EngineConfig
from omni_grpc.features import Effects
from omni_grpc.features.step_cache import apply
from omni_grpc.features.step_cache.memory import forecast
from omni_grpc.features.step_cache.policies import policy_of
from omni_grpc.features.step_cache.spectrum import filtered
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.state import COND, UNCOND, Conditioning, State, Tables
from omni_grpc.types.cache_fields import ALIASES, FIELDS
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.step_cache import METHODS, DbCache, FirstBlockCache, MagCache, RequestCache, SeaCache, TeaCache
from omni_grpc.types.step_masks import MASKS, SHORT, steps_mask
from tests.features.test_step_cache import Adds, cached, context, stacked, state

LAYOUTS = LayoutCache("cpu")


def made(method: str, **given: object) -> RequestCache:
    return METHODS[method](**{**{name: field.default for name, field in FIELDS[method].items()}, **given})


def with_cache(cache: RequestCache | None, steps: int = 10) -> State:
    it = state(steps)
    it.request, it.latents = dataclasses.replace(it.request, cache=cache), torch.ones(4, 1)
    return it


class Block(Adds):
    """Adds a function of the step to each row, and counts the rows that it runs for."""

    def __init__(self, adds: Callable[[int], float]) -> None:
        super().__init__()
        self.adds = adds

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        self.calls.append(len(rows))
        added = [torch.full((4, 1), self.adds(owner[0].evaluation)) for owner in rows.owners]
        return (carry[0] + torch.cat(added),)


def stack_of(*blocks: Callable[[int], float]) -> nn.Module:
    module = cached(len(blocks))
    group = module.stack.blocks
    for number, adds in enumerate(blocks):
        group[number] = Block(adds)
    return module


def evaluate(module: nn.Module, *owners: tuple[State, str], value: float = 1.0) -> list[float]:
    rows = Rows(owners, [Row.of(img=4)] * len(owners), LAYOUTS)
    rows.bind("blocks", "mod", [torch.zeros(1, len(module.stack), 1)] * len(owners))
    out = module.stack({"img": torch.full((4 * len(owners), 1), value)}, rows)["img"]
    return out[::4, 0].tolist()


def ran(module: nn.Module, number: int) -> int:
    return sum(module.stack.blocks[number].calls)


def trace(module: nn.Module, it: State, steps: int, watched: int = -1) -> str:
    """One evaluation after the other -> "1" where the watched block ran, "0" where it did not."""
    out = ""
    for evaluation in range(steps):
        it.evaluation = evaluation
        before = ran(module, watched % len(module.stack))
        evaluate(module, (it, COND))
        out += str(ran(module, watched % len(module.stack)) - before)
    return out


def still(step: int) -> float:
    return 1.0


# --- first block and DBCache ------------------------------------------------------------------------------------------


def test_the_first_block_always_runs_and_the_rest_by_what_it_adds() -> None:
    # what it adds grows by 10 % a step: against the last computed one, 10 %, 21 %, 33 %
    module = stack_of(lambda step: 1.1**step, still)
    it = with_cache(made("first_block", threshold=0.25), 10)
    assert trace(module, it, 10) == "1001001001"
    assert ran(module, 0) == 10


def test_db_cache_runs_head_and_tail_and_answers_for_the_middle() -> None:
    module = stack_of(still, still, lambda step: 10.0 + step, still)
    cache = made(
        "cache_dit", fn_compute_blocks=2, bn_compute_blocks=1, max_warmup_steps=2, max_continuous_cached_steps=0
    )
    it = with_cache(cache, 8)
    outs = []
    for evaluation in range(8):
        it.evaluation = evaluation
        outs += evaluate(module, (it, COND))
    # computed in the steps 0 and 1, and then what was added in step 1
    assert outs == [14.0, *[15.0] * 7]
    assert [ran(module, number) for number in range(4)] == [8, 8, 2, 8]
    (count,) = it.reports.values()
    assert (count.hits, count.misses, count.blocks, count.blocks_run) == (6, 2, 32, 32 - 6)
    assert count.method == "cache_dit"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "1111000100"),
        ({"max_continuous_cached_steps": 0}, "1111000000"),
        ({"max_continuous_cached_steps": 1}, "1111010101"),
        ({"max_cached_steps": 2}, "1111001111"),
        ({"max_warmup_steps": 0}, "1000100010"),
        ({"scm_steps_mask": (True,) * 6 + (False,) * 2 + (True, False)}, "1111110010"),
        ({"residual_diff_threshold": 0.0}, "1111111111"),
    ],
)
def test_the_limits_of_db_cache(given: dict[str, object], expected: str) -> None:
    assert trace(stack_of(still, still), with_cache(made("cache_dit", **given), 10), 10) == expected


def test_a_static_mask_reuses_whatever_changes_and_a_threshold_of_one_too() -> None:
    def wild(step: int) -> float:
        return 100.0**step

    mask = (True, True, False, False, True, False)
    for given, expected in (
        ({"scm_steps_policy": "dynamic", "scm_steps_mask": mask}, "111111"),
        ({"scm_steps_policy": "static", "scm_steps_mask": mask}, "110010"),
        ({"residual_diff_threshold": 1.0, "max_continuous_cached_steps": 0}, "110000"),
    ):
        cache = made("cache_dit", max_warmup_steps=2, **given)
        assert trace(stack_of(wild, still), with_cache(cache, 6), 6) == expected, given


def test_branches_decide_apart_unless_they_are_told_to_go_by_the_positive_one() -> None:
    class PerBranch(Block):
        def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
            self.calls.append(len(rows))
            added = [torch.full((4, 1), 1.0 if branch == COND else 3.0**it.evaluation) for it, branch in rows.owners]
            return (carry[0] + torch.cat(added),)

    for separate, expected in ((True, 2 + 4), (False, 2 + 2)):
        module = stack_of(still, still)
        module.stack.blocks[0] = PerBranch(still)
        cache = made("cache_dit", max_warmup_steps=2, max_continuous_cached_steps=0, cfg_diff_compute_separate=separate)
        it = with_cache(cache, 4)
        for evaluation in range(4):
            it.evaluation = evaluation
            evaluate(module, (it, COND), (it, UNCOND))
        assert ran(module, 1) == expected


def test_too_few_blocks_for_head_and_tail_are_all_run() -> None:
    module = stack_of(still, still)
    it = with_cache(made("cache_dit", fn_compute_blocks=1, bn_compute_blocks=1, max_warmup_steps=0), 6)
    assert trace(module, it, 6) == "111111"
    assert it.reports == {}


def test_settings_that_leave_no_block_to_skip_stop_the_start() -> None:
    given = {"Fn_compute_blocks": 2, "Bn_compute_blocks": 1}
    effects = Effects()
    with pytest.raises(ConfigError, match="fn_compute_blocks is 2, and with bn_compute_blocks 1 all 3 blocks"):
        apply(stacked(3), CacheConfig(cache_backend="cache_dit", cache_config=given), context(effects=effects))
    for blocks in (5, 4, 7):
        apply(stacked(blocks), CacheConfig(cache_backend="cache_dit", cache_config=given), context(effects=effects))
    assert effects.found.cached_blocks == 4, "of several denoisers the fewest"


# --- forecasts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_forecast_of_an_order_is_exact_for_polynomials_of_it(order: int) -> None:
    generator = torch.Generator().manual_seed(order)
    factors = torch.randn(order + 1, 3, 5, generator=generator, dtype=torch.float64)

    def at(step: int) -> Tensor:
        return sum((factors[power] * step**power for power in range(order + 1)), torch.zeros(3, 5, dtype=torch.float64))

    computed = [9, 6, 2][: order + 1]
    found = forecast([(step, {"img": at(step)}) for step in computed], 11)["img"]
    torch.testing.assert_close(found, at(11))
    if not order:
        assert torch.equal(found, at(9)), "of one residual, its own bits"


def test_an_order_of_taylor_seer_extrapolates_between_steps_that_were_computed() -> None:
    module = stack_of(still, lambda step: 10.0 * step)
    cache = made("cache_dit", max_warmup_steps=3, taylorseer_order=1, max_continuous_cached_steps=3)
    it = with_cache(cache, 8)
    outs = []
    for evaluation in range(8):
        it.evaluation = evaluation
        outs += evaluate(module, (it, COND))
    assert outs == pytest.approx([2.0 + 10.0 * step for step in range(8)]), "as if every step were computed"
    assert ran(module, 1) == 4


# --- MagCache ---------------------------------------------------------------------------------------------------------


def by_hand(ratios: Sequence[float], threshold: float, most: int, first: int) -> str:
    """The loop of the paper's code."""
    out, ratio, error, skipped = "", 1.0, 0.0, 0
    for step, each in enumerate(ratios):
        reuse = False
        if step >= first:
            ratio, skipped = ratio * each, skipped + 1
            error += abs(1 - ratio)
            reuse = error <= threshold and skipped <= most
            if not reuse:
                ratio, error, skipped = 1.0, 0.0, 0
        out += "0" if reuse else "1"
    return out


@pytest.mark.parametrize("seed", range(20))
def test_mag_cache_decides_as_the_paper_does(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    steps = int(torch.randint(5, 40, (), generator=generator))
    ratios = tuple((1 + 0.05 * torch.randn(steps, generator=generator)).tolist())
    threshold, most = float(torch.rand((), generator=generator)) / 5, int(torch.randint(1, 5, (), generator=generator))
    cache = made("mag_cache", ratios=ratios, threshold=threshold, max_skip_steps=most, retention_ratio=0.2)
    found = trace(stack_of(still), with_cache(cache, steps), steps)
    assert found == by_hand(ratios, threshold, most, int(0.2 * steps + 0.5))


def test_mag_cache_takes_a_curve_of_another_number_of_steps() -> None:
    policy = policy_of(made("mag_cache", ratios=(1.0, 2.0, 3.0, 4.0, 5.0)))
    assert [policy.ratio(step, 9) for step in range(9)] == [1, 1, 2, 3, 3, 3, 4, 5, 5]
    assert [policy.ratio(step, 3) for step in range(3)] == [1, 3, 5]


# --- SeaCache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [1.0, 0.7, 0.1, 0.0])
@pytest.mark.parametrize("shape", [(1, 6, 5), (3, 4, 7), (2, 1, 8)])
def test_the_filter_is_that_of_a_full_transform(shape: tuple[int, int, int], sigma: float) -> None:
    frames, height, width = shape
    x = torch.randn(frames * height * width, 6, generator=torch.Generator().manual_seed(1))
    whole = x.view(*shape, 6).double()
    noise, gain = min(max(sigma, 1e-6), 1 - 1e-6), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for axis, length in enumerate(shape):
        power = 1 / (torch.fft.fftfreq(length, dtype=torch.float64).abs() ** 2.5 + 1e-16)
        each = (1 - noise) * power / ((1 - noise) ** 2 * power + noise**2 + 1e-16)
        gain = gain * each.view([-1 if place == axis else 1 for place in range(4)])
    expected = torch.fft.ifftn(torch.fft.fftn(whole, dim=(0, 1, 2)) * (gain / gain.mean()), dim=(0, 1, 2)).real
    found = filtered(x, Grid(height=height, width=width, frames=frames), sigma, 2.5)
    torch.testing.assert_close(found.double(), expected.reshape(found.shape), rtol=1e-4, atol=1e-5)


def test_sea_cache_adds_up_changes_of_the_filtered_latents() -> None:
    module = stack_of(lambda step: 1.0 + step)
    it = with_cache(made("sea_cache", threshold=0.25, max_consecutive_cached=2, power_exp=0.0), 12)
    out = ""
    for evaluation in range(12):
        it.evaluation = evaluation
        # the same picture, 10 % brighter each time; under a flat spectrum the filter changes nothing
        it.latents = torch.full((4, 1), 1.1**evaluation)
        before = ran(module, 0)
        (made_now,) = evaluate(module, (it, COND))
        out += str(ran(module, 0) - before)
        assert made_now == pytest.approx(2.0 + evaluation), "extrapolated along a line, which it is"
    assert out == "110010010011"


# --- TeaCache ---------------------------------------------------------------------------------------------------------


def test_tea_cache_computes_after_so_many_steps_in_a_row() -> None:
    it = with_cache(made("tea_cache", rel_l1_thresh=1e9, max_continuous_cached_steps=2), 9)
    assert trace(cached_still(), it, 9) == "100100101"


def cached_still() -> nn.Module:
    return stack_of(still)


def test_the_signal_of_the_timestep_is_known_from_the_tables() -> None:
    it = with_cache(made("tea_cache", rel_l1_thresh=0.25, signal="timestep"), 9)
    tables = torch.tensor([1.1**step for step in range(9)]).view(9, 1, 1, 1)
    it.cond = {COND: Conditioning(row=Row.of(img=4), constants={}, tables=Tables(blocks=tables))}
    assert trace(cached_still(), it, 9) == "100100101"


# --- all of them ------------------------------------------------------------------------------------------------------

CACHES: dict[str, RequestCache] = {
    "tea_cache": made("tea_cache", rel_l1_thresh=1e9, max_continuous_cached_steps=3),
    "first_block": made("first_block", threshold=0.15),
    "cache_dit": made("cache_dit", fn_compute_blocks=2, bn_compute_blocks=1, max_warmup_steps=2, taylorseer_order=1),
    "mag_cache": made("mag_cache", ratios=(1.0,) * 10, threshold=0.1, max_skip_steps=2),
    "sea_cache": made("sea_cache", threshold=1e9, max_consecutive_cached=1, residual_order=0),
}


@pytest.mark.parametrize("seed", range(6))
def test_requests_with_unlike_caches_in_one_batch_get_what_each_gets_alone(seed: int) -> None:
    """Every method and none, in batches of random company and order, from random steps on."""

    def blocks() -> nn.Module:
        return stack_of(
            lambda step: 1.0 + 0.01 * step, lambda step: 2.0 - 0.1 * step, lambda step: 0.5 * step, lambda step: 3.0
        )

    names = [*CACHES, "none"]
    alone = {}
    for name in names:
        it, module = with_cache(CACHES.get(name), 10), blocks()
        alone[name] = []
        for evaluation in range(10):
            it.evaluation = evaluation
            alone[name] += evaluate(module, (it, COND))
    generator = torch.Generator().manual_seed(seed)
    module, running = blocks(), {name: with_cache(CACHES.get(name), 10) for name in names}
    together: dict[str, list[float]] = {name: [] for name in names}
    while any(len(outs) < 10 for outs in together.values()):
        left = [name for name in names if len(together[name]) < 10]
        order = torch.randperm(len(left), generator=generator)[: int(torch.randint(1, 7, (), generator=generator))]
        chosen = [left[number] for number in order]
        outs = evaluate(module, *((running[name], COND) for name in chosen))
        for name, out in zip(chosen, outs, strict=True):
            together[name].append(out)
            running[name].evaluation += 1
    assert together == alone, "the same bits"
    for name in CACHES:
        (count,) = running[name].reports.values()
        assert count.hits > 0
        assert count.method == name
        assert count.hits + count.misses == 10


# --- step masks -------------------------------------------------------------------------------------------------------


def gaps(mask: str) -> list[int]:
    """Lengths of the runs of steps that are not computed."""
    return [len(run) for run in mask.split("1") if run]


@pytest.mark.parametrize("name", MASKS)
def test_step_masks_keep_their_form_at_any_number_of_steps(name: str) -> None:
    own = MASKS[name]
    assert steps_mask(name, 28) == tuple(step == "1" for step in own)
    for steps in range(10, 101):
        mask = "".join(str(int(step)) for step in steps_mask(name, steps))
        assert len(mask) == steps
        assert mask[0] == mask[-1] == "1"
        assert max(gaps(mask), default=0) <= math.ceil((max(gaps(own)) + 1) * (steps - 1) / 27), mask
        if steps >= 28:
            assert mask.count("1") / steps == pytest.approx(own.count("1") / 28, abs=0.13), mask


def test_few_steps_have_masks_of_their_own_or_none() -> None:
    assert {steps: "".join(str(int(each)) for each in steps_mask("fast", steps)) for steps in SHORT} == {
        4: "1101",
        6: "111001",
        8: "11101001",
        9: "111101001",
    }
    for steps in (1, 2, 3, 5, 7):
        with pytest.raises(ValueError, match=f"no step mask for {steps} steps; there is one for 4, 6, and from 8 on"):
            steps_mask("slow", steps)


def test_names_of_peers_are_taken_for_methods() -> None:
    known = {*NATIVE_CACHES, *DIFFUSERS_CACHES}
    assert len(known) == len(NATIVE_CACHES) + len(DIFFUSERS_CACHES) - 3, "what both have is called the same"
    for alias, name in ALIASES.items():
        cache = EngineConfig.from_settings(cache_backend=alias).cache
        assert cache is not None
        assert (cache.cache_backend, alias in known, name in known) == (name, False, True)


def test_every_record_is_used() -> None:
    assert set(METHODS.values()) == {TeaCache, FirstBlockCache, DbCache, MagCache, SeaCache}
