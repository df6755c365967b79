"""The settings of a model that is spread over several processes, its ranks."""

from __future__ import annotations

import dataclasses

from omni_grpc.config.options import setting
from omni_grpc.types.address import MAX_PORT
from omni_grpc.types.ranks import ParallelSizes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many ranks share what; each has a GPU of its own, or a part of the cores of a CPU. Native models only."""

    tensor_parallel_size: int = setting(1, "ranks that share the weights of each layer", minimum=1)
    ulysses_degree: int = setting(1, "ranks that share tokens, and heads in attention (also --usp)", minimum=1)
    ring_degree: int = setting(
        1, "ranks that share tokens, and pass keys and values around in attention (also --ring)", minimum=1
    )
    sequence_parallel_size: int | None = setting(
        None,
        "ranks that share tokens; those that Ulysses leaves fetch keys and values from each other (default: "
        "--ulysses-degree x --ring-degree)",
        minimum=1,
    )
    cfg_parallel_size: int = setting(1, "ranks that share guidance branches", minimum=1)
    pipeline_parallel_size: int = setting(1, "ranks that each have a range of the blocks", minimum=1)
    vae_patch_parallel_size: int = setting(
        1, "of all these ranks, those that decode together, each a part of every frame", minimum=1
    )
    use_hsdp: bool = setting(False, "ranks that share tokens keep a part of each weight, and gather it when it is used")
    hsdp_shard_size: int | None = setting(
        None,
        "with --use-hsdp: of the ranks that share tokens, as many neighbors keep each weight once, and the others the "
        "same again (default: all of them share it)",
        minimum=2,
    )
    enable_expert_parallel: bool = setting(
        False, "ranks that share weights or tokens share the experts of mixture-of-experts layers"
    )

    @property
    def sizes(self) -> ParallelSizes:
        """All of them."""
        names = [field.name for field in dataclasses.fields(ParallelSizes)]
        return ParallelSizes(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig:
    """How long ranks wait for each other, and how those of several hosts meet."""

    rank_timeout: float = setting(
        60.0,
        "seconds that a rank may lag behind the others before all of them are ended and started again",
        minimum=1,
    )
    rank_port: int | None = setting(
        None,
        "under torchrun, the port of rank 0's host at which the others are told what to do (default: MASTER_PORT + 1)",
        minimum=1,
        maximum=MAX_PORT,
    )
    rank_secret_file: str | None = setting(
        None, "under torchrun, a file with a secret that the ranks of all hosts have in common, of 16 bytes or more"
    )
