"""What stays on a device under a budget: never more than the budget, and never less than a smaller one leaves there."""

from __future__ import annotations

import dataclasses
import math
import os
import random
from pathlib import Path

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.feature_rules.lora import DEVICE_CACHE, device_bytes, device_cache
from omni_grpc.resolve.residency import (
    GIB,
    DenoiserSize,
    ModelSizes,
    PartSize,
    ResidencyPlan,
    plan_adapter,
    plan_residency,
)
from omni_grpc.types.errors import ConfigError

QWEN = ModelSizes(
    denoisers=(DenoiserSize(name="transformer", fixed=GIB // 4, stacks=((680 << 20,) * 60,)),),
    parts=(
        PartSize(name="text_encoder", weights=15 * GIB, in_blocks=13 * GIB, block=GIB // 2),
        PartSize(name="vae", weights=GIB // 4, work=GIB),
    ),
    step=GIB,
)
"""About as large as Qwen-Image."""


def made_up(seed: int) -> ModelSizes:
    draw = random.Random(seed)

    def size() -> int:
        return draw.randrange(1, 1000)

    stacks = tuple(tuple(size() for _ in range(draw.randrange(1, 9))) for _ in range(draw.randrange(3)))
    denoisers = tuple(
        DenoiserSize(name=f"transformer_{number}", fixed=size(), stacks=stacks)
        for number in range(draw.randrange(1, 3))
    )
    parts = []
    for number in range(draw.randrange(4)):
        blocks = [size() for _ in range(draw.randrange(6))]
        parts.append(
            PartSize(
                name=f"part_{number}",
                weights=sum(blocks) + size(),
                work=draw.choice((0, size())),
                in_blocks=sum(blocks),
                block=max(blocks, default=0),
            )
        )
    graphs, margin = draw.choice((0, size())), draw.choice((0.0, 0.1))
    return ModelSizes(denoisers=denoisers, parts=tuple(parts), step=size(), graphs=graphs, margin=margin)


def used(sizes: ModelSizes, plan: ResidencyPlan) -> int:
    """The most that is on the device at once, told anew from what the plan says."""
    count = sizes.most_blocks if plan.resident_blocks is None else plan.resident_blocks
    held = sum(it.with_resident(count) if plan.resident_blocks is not None else it.whole for it in sizes.denoisers)
    there = [part for part in sizes.parts if part.name not in plan.between_phases]
    here = sum(part.weights for part in there)
    runs = (sizes.step + plan.room + sum(part.work for part in there)) / (1 - sizes.margin)
    return math.floor(held + here + runs) + (0 if plan.resident_blocks is not None else sizes.graphs)


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_takes_more_than_its_budget_and_a_larger_budget_offloads_no_more(seed: int) -> None:
    sizes = made_up(seed)
    whole = sizes.weights + sizes.graphs + 2 * (sizes.step + sum(part.work for part in sizes.parts))
    before: ResidencyPlan | None = None
    for budget in (*range(1, whole, max(1, whole // 120)), whole, whole + 1):
        try:
            plan = plan_residency(sizes, budget)
        except ConfigError:
            assert before is None, "a larger budget was refused"
            continue
        assert plan.peak <= budget
        assert used(sizes, plan) <= budget
        if before is not None:
            assert plan.resident >= before.resident
            assert set(plan.between_phases) <= set(before.between_phases)
            if plan.resident_blocks == before.resident_blocks:
                assert len(plan.by_block) <= len(before.by_block)
            blocks = [sizes.most_blocks if it.resident_blocks is None else it.resident_blocks for it in (before, plan)]
            assert blocks == sorted(blocks)
        before = plan
    assert before is not None
    assert (before.between_phases, before.by_block, before.resident_blocks) == ((), (), None)
    assert before.resident == sizes.weights


@pytest.mark.parametrize("seed", range(15))
def test_the_refusal_names_the_least_budget_that_is_taken(seed: int) -> None:
    sizes = made_up(seed)
    least = next(budget for budget in range(1, 1 << 30) if _fits(sizes, budget))
    assert not any(_fits(sizes, budget) for budget in range(max(1, least - 50), least))
    scaled = _times(sizes, 1 << 22)
    with pytest.raises(ConfigError) as caught:
        plan_residency(scaled, 1 << 22)
    (violation,) = caught.value.failure.violations
    gib = float(violation.description.partition("at least ")[2].partition(":")[0])
    plan_residency(scaled, int(gib * GIB) + 1)
    with pytest.raises(ConfigError):
        plan_residency(scaled, int((gib - 0.02) * GIB))


def _fits(sizes: ModelSizes, budget: int) -> bool:
    try:
        plan_residency(sizes, budget)
    except ConfigError:
        return False
    return True


def _times(sizes: ModelSizes, factor: int) -> ModelSizes:
    return ModelSizes(
        denoisers=tuple(
            DenoiserSize(
                name=it.name,
                fixed=it.fixed * factor,
                stacks=tuple(tuple(block * factor for block in blocks) for blocks in it.stacks),
            )
            for it in sizes.denoisers
        ),
        parts=tuple(
            PartSize(
                name=it.name,
                weights=it.weights * factor,
                work=it.work * factor,
                in_blocks=it.in_blocks * factor,
                block=it.block * factor,
            )
            for it in sizes.parts
        ),
        step=sizes.step * factor,
        graphs=sizes.graphs * factor,
        margin=sizes.margin,
    )


@pytest.mark.parametrize(
    ("gib", "told"),
    [
        (80, "all resident: 59.4 GB of weights, budget 85.9 GB"),
        (57, "text_encoder, vae between phases: 59.4 GB of weights, budget 61.2 GB"),
        (50, "text_encoder by block, vae between phases: 59.4 GB of weights, budget 53.7 GB"),
        (30, "text_encoder by block, vae between phases; 36 of 60 blocks resident: 59.4 GB of weights, budget 32.2 GB"),
        (6, "text_encoder by block, vae between phases; 0 of 60 blocks resident: 59.4 GB of weights, budget 6.44 GB"),
    ],
)
def test_what_leaves_first_is_what_costs_least(gib: int, told: str) -> None:
    assert plan_residency(QWEN, gib * GIB).describe(QWEN, gib * GIB) == told


def test_a_model_that_cannot_fit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"give it 5\.58 or more") as caught:
        plan_residency(QWEN, 4 * GIB)
    assert caught.value.failure.reason == "BUDGET_TOO_SMALL"
    assert [violation.field for violation in caught.value.failure.violations] == ["gpu_memory_budget"]


def test_offloads_that_were_asked_for_stay_on_within_any_budget() -> None:
    plenty = 1000 * GIB
    staged = plan_residency(QWEN, plenty, staged=True)
    assert (staged.between_phases, staged.resident_blocks) == (("text_encoder", "vae"), None)
    assert staged.room == sum(part.weights + part.work for part in QWEN.parts)
    some = plan_residency(QWEN, plenty, resident_blocks=7)
    assert (some.between_phases, some.resident_blocks) == ((), 7)
    # and as many as were asked for, where fewer would fit
    with pytest.raises(ConfigError):
        plan_residency(QWEN, 20 * GIB, resident_blocks=40)


def test_a_pipeline_of_diffusers_keeps_all_or_one_component() -> None:
    assert not plan_adapter(QWEN, 80 * GIB)
    assert plan_adapter(QWEN, 50 * GIB)
    with pytest.raises(ConfigError, match=r"give it 41\.1, or add --enable-layerwise-offload"):
        plan_adapter(QWEN, 30 * GIB)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_kept_for_adapters_comes_on_top_of_every_plan(seed: int) -> None:
    plain = made_up(seed)
    kept = dataclasses.replace(plain, adapters=1 << 20)
    whole = plain.weights + plain.graphs + 2 * (plain.step + sum(part.work for part in plain.parts))
    for budget in range(1, whole, max(1, whole // 30)):
        if not _fits(plain, budget):
            assert not _fits(kept, budget + (1 << 20))
            continue
        without, beside = plan_residency(plain, budget), plan_residency(kept, budget + (1 << 20))
        assert beside == dataclasses.replace(without, peak=without.peak + (1 << 20))


def test_the_bytes_of_adapters_are_those_of_the_setting_or_of_their_files(tmp_path: Path) -> None:
    def of(**settings: object) -> int:
        return device_cache(EngineConfig.from_settings(model="toy", **settings))

    file = tmp_path / "a.safetensors"
    file.touch()
    os.truncate(file, 3 << 30)
    assert (of(), of(lora_device_cache=5), of(lora_host_cache=5)) == (0, 5, DEVICE_CACHE)
    assert (of(lora={"a": str(file)}), of(lora={"a": str(tmp_path), "b": str(file)})) == (3 << 30, 6 << 30)
    assert of(lora={"a": str(tmp_path / "nowhere")}) == DEVICE_CACHE
    # and weights that have adapters merged in
    plain, own = (EngineConfig.from_settings(model="toy", **more) for more in ({}, {"lora_merged_cache": 7}))
    assert (device_bytes(plain), device_bytes(own)) == (0, DEVICE_CACHE + 7)
