"""DiffusionParallelConfig: which ranks it asks for, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from omni_grpc import compat
from omni_grpc.config import EngineConfig
from omni_grpc.types.errors import Code, ConfigError

Config = compat.DiffusionParallelConfig

SAME: list[tuple[Mapping[str, Any], Mapping[str, Any], int]] = [
    ({}, {}, 1),
    ({"ulysses_degree": 2}, {"ulysses_degree": 2}, 2),
    ({"ulysses_degree": 2, "ring_degree": 2}, {"ulysses_degree": 2, "ring_degree": 2}, 4),
    (
        {"sequence_parallel_size": 4, "ulysses_degree": 2, "ring_degree": 2},
        {"sequence_parallel_size": 4, "ulysses_degree": 2, "ring_degree": 2},
        4,
    ),
    ({"allgather_degree": 2}, {"sequence_parallel_size": 2}, 2),
    (
        {"tensor_parallel_size": 2, "cfg_parallel_size": 2, "vae_patch_parallel_size": 4},
        {"tensor_parallel_size": 2, "cfg_parallel_size": 2, "vae_patch_parallel_size": 4},
        4,
    ),
    ({"pipeline_parallel_size": 2, "vae_parallel_mode": "spatial_shard_height"}, {"pipeline_parallel_size": 2}, 2),
    ({"data_parallel_size": 3, "ulysses_degree": 2}, {"data_parallel_size": 3, "ulysses_degree": 2}, 6),
    (
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        2,
    ),
    ({"use_hsdp": True, "ulysses_degree": 4}, {"use_hsdp": True, "ulysses_degree": 4}, 4),
    ({"use_hsdp": True, "ring_degree": 4, "hsdp_shard_size": 4}, {"use_hsdp": True, "ring_degree": 4}, 4),
    (
        {"use_hsdp": True, "ulysses_degree": 4, "hsdp_shard_size": 2, "hsdp_replicate_size": 2},
        {"use_hsdp": True, "ulysses_degree": 4, "hsdp_shard_size": 2},
        4,
    ),
    (
        {"use_hsdp": True, "ulysses_degree": 4, "hsdp_replicate_size": 2},
        {"use_hsdp": True, "ulysses_degree": 4, "hsdp_shard_size": 2},
        4,
    ),
    # each guidance branch has weights of its own
    (
        {"use_hsdp": True, "ulysses_degree": 2, "cfg_parallel_size": 2, "hsdp_replicate_size": 2},
        {"use_hsdp": True, "ulysses_degree": 2, "cfg_parallel_size": 2},
        4,
    ),
    (
        {"use_hsdp": True, "ulysses_degree": 2, "cfg_parallel_size": 2},
        {"use_hsdp": True, "ulysses_degree": 2, "cfg_parallel_size": 2},
        4,
    ),
    # with nothing else to share, they share tokens
    ({"use_hsdp": True, "hsdp_shard_size": 4}, {"use_hsdp": True, "sequence_parallel_size": 4}, 4),
    (
        {"use_hsdp": True, "hsdp_shard_size": 2, "hsdp_replicate_size": 2},
        {"use_hsdp": True, "sequence_parallel_size": 4, "hsdp_shard_size": 2},
        4,
    ),
]
"""What is given, the same in our settings, and how many processes that makes."""


@pytest.mark.parametrize(("given", "ours", "processes"), SAME)
def test_ranks_are_those_of_our_settings(given: Mapping[str, Any], ours: Mapping[str, Any], processes: int) -> None:
    assert Config(**given).settings() == ours
    config = compat.OmniDiffusionConfig(model="m", parallel_config=Config(**given))
    assert ours.items() <= config.settings().items()
    assert EngineConfig.from_settings(**config.settings()).processes == processes


@pytest.mark.parametrize(
    ("given", "num_gpus", "replicas"),
    [({}, 1, 1), ({}, 3, 3), ({"tensor_parallel_size": 2}, 2, 1), ({"tensor_parallel_size": 2}, 4, 2)],
)
def test_gpus_that_no_rank_takes_have_replicas(given: Mapping[str, Any], num_gpus: int, replicas: int) -> None:
    config = compat.OmniDiffusionConfig(model="m", num_gpus=num_gpus, parallel_config=Config(**given))
    assert config.settings().get("data_parallel_size", 1) == replicas


REFUSED: list[tuple[Mapping[str, Any], str, str]] = [
    ({"ulysses_degree": 0}, "ulysses_degree", "is 0, expected at least 1"),
    ({"tensor_parallel_size": True}, "tensor_parallel_size", "is True, expected"),
    ({"data_parallel_size": -1}, "data_parallel_size", "is -1"),
    ({"text_encoder_tp_size": 2}, "text_encoder_tp_size", "whole on every rank"),
    ({"ulysses_mode": "advanced_uaa"}, "ulysses_mode", "sequence_parallel_size without ulysses_degree"),
    ({"ulysses_a2a_permute": True}, "ulysses_a2a_permute", "leave it out"),
    ({"vae_parallel_mode": "spatial_shard_width"}, "vae_parallel_mode", "spatial_shard_height"),
    ({"mask_sp_padding": True}, "mask_sp_padding", "no padding"),
    ({"allgather_degree": 2, "ring_degree": 2}, "allgather_degree", "set one of them"),
    ({"allgather_degree": 2, "sequence_parallel_size": 4}, "sequence_parallel_size", "leave one out"),
    ({"use_hsdp": True}, "use_hsdp", "give it an hsdp_shard_size, a ulysses_degree or a ring_degree"),
    ({"hsdp_shard_size": 2}, "hsdp_shard_size", "has no effect without use_hsdp"),
    ({"hsdp_replicate_size": 2}, "hsdp_replicate_size", "has no effect without use_hsdp"),
    ({"use_hsdp": True, "hsdp_shard_size": 1}, "hsdp_shard_size", "at least 2"),
    ({"use_hsdp": True, "ring_degree": 4, "hsdp_shard_size": 2}, "hsdp_replicate_size", "set it to 2"),
    ({"use_hsdp": True, "ring_degree": 4, "hsdp_shard_size": 3}, "hsdp_shard_size", "divide the 4 ranks"),
    ({"use_hsdp": True, "ring_degree": 4, "hsdp_replicate_size": 3}, "hsdp_replicate_size", "a value that works is 1"),
    (
        {"use_hsdp": True, "ring_degree": 2, "cfg_parallel_size": 2, "hsdp_shard_size": 4},
        "hsdp_shard_size",
        "set hsdp_shard_size=2 and hsdp_replicate_size=2",
    ),
]


@pytest.mark.parametrize(("given", "field", "said"), REFUSED)
def test_ranks_that_cannot_be_are_refused_by_name(given: Mapping[str, Any], field: str, said: str) -> None:
    for make in (lambda: Config(**given), lambda: compat.Omni("m", **given)):
        with pytest.raises(ConfigError) as refused:
            make()
        assert (refused.value.code, refused.value.reason) == (Code.INVALID_ARGUMENT, "NOT_SUPPORTED")
        assert [violation.field for violation in refused.value.violations] == [field]
        assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"num_gpus": 3, "tensor_parallel_size": 2}, "num_gpus"),
        ({"num_gpus": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "num_gpus"),
        ({"num_gpus": 0}, "num_gpus"),
        ({"distributed_executor_backend": "mp"}, "distributed_executor_backend"),
        ({"distributed_executor_backend": "uni", "ring_degree": 2}, "distributed_executor_backend"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend"),
        ({"enable_distributed_layerwise_offload": True}, "enable_distributed_layerwise_offload"),
    ],
)
def test_processes_that_do_not_add_up_are_refused_by_name(given: Mapping[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compat.Omni("m", **given)
    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"ulysses_degree": 3}, "ulysses_degree"),
        ({"tensor_parallel_size": 2, "ulysses_degree": 2, "use_hsdp": True}, "use_hsdp"),
        ({"cfg_parallel_size": 2, "use_hsdp": True}, "use_hsdp"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"ulysses_degree": 2, "vae_patch_parallel_size": 2, "vae_use_tiling": True}, "vae_patch_parallel_size"),
    ],
)
def test_what_the_model_cannot_have_is_refused_before_any_process(
    tiny_qwen_image: Path, given: Mapping[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        compat.Omni(str(tiny_qwen_image), device="cpu", **given)
    assert refused.value.reason == "RANKS_DO_NOT_FIT"
    assert [violation.field for violation in refused.value.violations] == [field]
