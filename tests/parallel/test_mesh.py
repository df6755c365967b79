"""Who belongs together, and what ranks cannot share: known before any process is started."""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.feature_rules.ranks import DenoiserShape, check_sizes
from omni_grpc.nn.attention import outermost
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.ranks import Axis, ParallelSizes, layout
from omni_grpc.types.spec import Checkpoint
from tests.models.cases import ENTRIES
from tests.parallel import jobs
from tests.parallel.model_jobs import load
from tests.parallel.ranks import Ranks


def test_neighbors_share_what_talks_most() -> None:
    sizes = ParallelSizes(tensor_parallel_size=2, ulysses_degree=2, ring_degree=2, cfg_parallel_size=2)
    groups = layout(16, sizes)
    assert groups[Axis.TENSOR][:3] == ((0, 1), (2, 3), (4, 5))
    assert groups[Axis.ULYSSES][:3] == ((0, 2), (1, 3), (4, 6))
    assert groups[Axis.OUTER][:3] == ((0, 4), (1, 5), (2, 6))
    assert groups[Axis.SEQUENCE][:2] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups[Axis.CFG][:2] == ((0, 8), (1, 9))
    assert groups[Axis.PEERS] == (tuple(range(8)), tuple(range(8, 16)))
    assert groups[Axis.WORLD] == (tuple(range(16)),)
    assert groups[Axis.SHARD] == groups[Axis.EXPERT] == tuple((rank,) for rank in range(16))


def test_every_rank_is_in_one_group_of_each_axis() -> None:
    draw = random.Random(0)
    for _ in range(50):
        tensor, ulysses, ring, cfg, pipeline = (draw.choice((1, 2, 3)) for _ in range(5))
        sizes = ParallelSizes(
            tensor_parallel_size=tensor,
            ulysses_degree=ulysses,
            ring_degree=ring,
            cfg_parallel_size=cfg,
            pipeline_parallel_size=pipeline,
        )
        groups = layout(sizes.world, sizes)
        sizes_of = {axis: {len(group) for group in of_axis} for axis, of_axis in groups.items()}
        assert sizes_of[Axis.SEQUENCE] == {ulysses * ring}
        assert sizes_of[Axis.PEERS] == {tensor * ulysses * ring}
        for of_axis in groups.values():
            assert sorted(itertools.chain.from_iterable(of_axis)) == list(range(sizes.world))


def test_tokens_are_shared_by_fetching_where_nothing_else_is_said() -> None:
    both = ParallelSizes(ulysses_degree=2, sequence_parallel_size=4)
    assert (both.sequence, both.outer, both.world) == (4, 2, 4)
    assert layout(4, both)[Axis.OUTER] == ((0, 2), (1, 3))
    assert layout(4, ParallelSizes(sequence_parallel_size=4))[Axis.OUTER] == ((0, 1, 2, 3),)


def test_the_ranks_that_decode_are_neighbors() -> None:
    assert layout(4, ParallelSizes(ulysses_degree=4, vae_patch_parallel_size=2))[Axis.VAE] == ((0, 1), (2, 3))


def test_neighbors_shard_weights_and_other_groups_have_the_same_again() -> None:
    every = ParallelSizes(ulysses_degree=2, ring_degree=2, cfg_parallel_size=2, use_hsdp=True)
    assert layout(8, every)[Axis.SHARD] == ((0, 1, 2, 3), (4, 5, 6, 7))
    pairs = dataclasses.replace(every, hsdp_shard_size=2)
    assert (pairs.shard, pairs.world) == (2, 8)
    assert layout(8, pairs)[Axis.SHARD] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout(8, pairs)[Axis.PEERS] == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="the sizes make up 4 ranks, and there are 6") as caught:
        layout(6, ParallelSizes(ring_degree=4))
    assert [violation.field for violation in caught.value.violations] == ["world_size"]


# --- what a checkpoint can share --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: open_checkpoint(entry.build(folder / name)) for name, entry in ENTRIES.items()}


def test_shapes_are_those_of_the_models(checkpoints: dict[str, Checkpoint]) -> None:
    for checkpoint in checkpoints.values():
        pipeline = load(None, checkpoint, {})
        paths = {path.rpartition(".")[2]: part for path, part in pipeline.named_modules()}
        for component in checkpoint.spec.weights:
            if component not in paths or component not in checkpoint.configs:
                continue
            shape, module = DenoiserShape.of(checkpoint.configs[component]), paths[component]
            assert {(each.num_heads, each.num_kv_heads) for _, each in outermost(module)} == {
                (shape.heads, shape.kv_heads)
            }
            assert shape.blocks == len(module.stack)
            hidden = {part.out_features for path, part in module.named_modules() if path.endswith("ffn.up")}
            assert hidden in (set(), {shape.hidden})


def large(checkpoint: Checkpoint, heads: int, **config: Any) -> Checkpoint:
    configs = dict(checkpoint.configs)
    names = {name: heads for name in ("num_attention_heads", "n_heads", "n_kv_heads") if name in configs["transformer"]}
    configs["transformer"] = {**configs["transformer"], **names, **config}
    return dataclasses.replace(checkpoint, configs=configs)


REFUSED: dict[str, tuple[str, ParallelSizes, int, str, str]] = {
    "negative": ("WanPipeline", ParallelSizes(ring_degree=0), 8, "ring_degree", "is 0, and must be at least 1"),
    "tensor": (
        "WanPipeline",
        ParallelSizes(tensor_parallel_size=5),
        8,
        "tensor_parallel_size",
        "cannot share the 12 heads of transformer evenly; the nearest value that works is 4",
    ),
    "Ulysses": (
        "QwenImagePipeline",
        ParallelSizes(ulysses_degree=8),
        8,
        "ulysses_degree",
        "cannot share 12 heads evenly; the nearest value that works is 6; ring_degree and",
    ),
    "Ulysses after tensor": (
        "QwenImagePipeline",
        ParallelSizes(tensor_parallel_size=2, ulysses_degree=4),
        8,
        "ulysses_degree",
        "12 heads evenly after a tensor_parallel_size of 2; the nearest value that works is 3",
    ),
    "sequence and Ulysses": (
        "QwenImagePipeline",
        ParallelSizes(ulysses_degree=3, sequence_parallel_size=4),
        8,
        "sequence_parallel_size",
        "is 4, no multiple of the ulysses_degree of 3; the nearest value that works is 3",
    ),
    "sequence and ring": (
        "QwenImagePipeline",
        ParallelSizes(ulysses_degree=2, ring_degree=2, sequence_parallel_size=8),
        8,
        "sequence_parallel_size",
        "is 8, and ulysses_degree x ring_degree is 4",
    ),
    "branches": (
        "QwenImagePipeline",
        ParallelSizes(cfg_parallel_size=3),
        8,
        "cfg_parallel_size",
        "has two guidance branches; the nearest value that works is 2",
    ),
    "no branches": (
        "QwenImagePipeline",
        ParallelSizes(cfg_parallel_size=2),
        8,
        "cfg_parallel_size",
        "has no second guidance branch; the nearest value that works is 1",
    ),
    "decode": (
        "WanPipeline",
        ParallelSizes(ring_degree=4, vae_patch_parallel_size=3),
        8,
        "vae_patch_parallel_size",
        "has to divide the 4 ranks of the model; the nearest value that works is 2",
    ),
    "no experts": (
        "WanPipeline",
        ParallelSizes(ring_degree=2, enable_expert_parallel=True),
        8,
        "enable_expert_parallel",
        "must be off: transformer has no experts",
    ),
    "one rank for all experts": (
        "WanPipeline",
        ParallelSizes(cfg_parallel_size=2, enable_expert_parallel=True),
        8,
        "enable_expert_parallel",
        "must be off: one rank has all experts",
    ),
    "fewer experts": (
        "WanPipeline",
        ParallelSizes(ring_degree=4, enable_expert_parallel=True),
        8,
        "enable_expert_parallel",
        "must be off: transformer has 3 experts, fewer than the 4 ranks that would share them",
    ),
    "weights sharded twice": (
        "WanPipeline",
        ParallelSizes(tensor_parallel_size=2, ring_degree=2, use_hsdp=True),
        8,
        "use_hsdp",
        "must be off beside tensor_parallel_size",
    ),
    "experts beside sharded weights": (
        "QwenImagePipeline",
        ParallelSizes(ring_degree=2, use_hsdp=True, enable_expert_parallel=True),
        8,
        "use_hsdp",
        "must be off beside enable_expert_parallel",
    ),
    "no ranks to shard": (
        "WanPipeline",
        ParallelSizes(cfg_parallel_size=2, use_hsdp=True),
        8,
        "use_hsdp",
        "needs ranks that share tokens",
    ),
    "uneven shards": (
        "WanPipeline",
        ParallelSizes(ring_degree=4, use_hsdp=True, hsdp_shard_size=3),
        8,
        "hsdp_shard_size",
        "is 3, and has to divide the 4 ranks that share tokens into groups of two or more; the nearest value that "
        "works is 2",
    ),
    "shards of one": (
        "WanPipeline",
        ParallelSizes(ring_degree=3, use_hsdp=True, hsdp_shard_size=1),
        8,
        "hsdp_shard_size",
        "the nearest value that works is 3",
    ),
    "shards without HSDP": (
        "WanPipeline",
        ParallelSizes(ring_degree=4, hsdp_shard_size=2),
        8,
        "hsdp_shard_size",
        "has no effect without use_hsdp",
    ),
    "blocks": (
        "WanPipeline",
        ParallelSizes(pipeline_parallel_size=7),
        8,
        "pipeline_parallel_size",
        "is 7, and transformer has 2 blocks; the nearest value that works is 2",
    ),
    "devices": (
        "WanPipeline",
        ParallelSizes(tensor_parallel_size=2, ring_degree=4),
        6,
        "ring_degree",
        "is 4, which makes 8 ranks, and there are 6 devices; give it 3 or less",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused_by_its_setting(checkpoints: dict[str, Checkpoint], case: str) -> None:
    name, sizes, devices, setting, message = REFUSED[case]
    more = {"num_experts": 3} if "experts" in case and case != "no experts" else {}
    checkpoint = large(checkpoints[name], 12, ffn_dim=48, **more)
    if case == "no branches":
        checkpoint = dataclasses.replace(checkpoint, spec=dataclasses.replace(checkpoint.spec, guidance=()))
    wrong = check_sizes(checkpoint, sizes, devices)
    assert list(wrong) == [setting]
    assert message in wrong[setting]


@pytest.mark.parametrize(
    "sizes",
    [
        ParallelSizes(),
        ParallelSizes(tensor_parallel_size=2, ulysses_degree=2, ring_degree=2),
        ParallelSizes(tensor_parallel_size=4, cfg_parallel_size=2, vae_patch_parallel_size=8),
        ParallelSizes(ring_degree=7),
        ParallelSizes(ring_degree=2, ulysses_degree=2, use_hsdp=True, hsdp_shard_size=2, cfg_parallel_size=2),
        ParallelSizes(sequence_parallel_size=5),
    ],
    ids=str,
)
def test_what_can_be_shared_is_not_refused(checkpoints: dict[str, Checkpoint], sizes: ParallelSizes) -> None:
    assert check_sizes(large(checkpoints["QwenImagePipeline"], 24), sizes, 8) == {}


def test_rules_need_no_torch() -> None:
    code = "import sys, omni_grpc.feature_rules.ranks, omni_grpc.types.ranks; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_ranks_go_by_what_the_first_one_says(ranks: Ranks) -> None:
    sizes = ParallelSizes(tensor_parallel_size=2, cfg_parallel_size=2)
    said = ranks.run(jobs.ask_first, sizes=sizes)
    assert said == [(True, {"measured": 0}, 0.0), (True, {"measured": 0}, 0.0), *[(True, {"measured": 0}, 2.0)] * 2]


def test_features_without_ranks_are_refused() -> None:
    for feature in jobs.RANKED:
        assert "there is one" in jobs.refusal(None, feature, nn.ModuleDict())
