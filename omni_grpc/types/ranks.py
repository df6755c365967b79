"""How the processes (ranks) of one model share its work: how many for what, and which of them belong together."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Mapping

from omni_grpc.types.errors import ConfigError, Violation

RANK, WORLD_SIZE, RENDEZVOUS = "RANK", "WORLD_SIZE", "OMNI_RANKS_RENDEZVOUS"
"""Variables of a process that is a rank: its number, of how many, and where they find each other, which is a file, or
tcp://HOST:PORT/NAME where they are on several machines: a store of rank 0, or of torchrun, with a name for these ranks.
"""
LISTENER = "OMNI_RANKS_LISTENER"
"""Of rank 0: the file descriptor of a socket that listens at that address."""
TCP = "tcp://"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables of gloo and of NCCL: which network interface ranks meet on."""

Groups = tuple[tuple[int, ...], ...]
"""Ranks that belong together, group by group. Each rank is in one of them."""


class Axis(enum.StrEnum):
    """What ranks are grouped for.

    TENSOR: parts of weights. ULYSSES: parts of tokens, exchanged for heads in attention. OUTER: parts of tokens whose
    keys and values are fetched, or go around in a ring. SEQUENCE: both of these. PIPELINE: ranges of blocks. CFG:
    guidance branches. PEERS: ranks that compute the same rows in the same blocks, TENSOR and SEQUENCE together.
    EXPERT: the same ranks, where they share experts. SHARD: of these, ranks that keep a part of each weight and gather
    the whole; all of them, or as many neighbors as `hsdp_shard_size` says. WORLD: all ranks. VAE: parts of what is
    decoded, a group by itself since decodes run beside steps.
    """

    TENSOR = "tensor"
    ULYSSES = "ulysses"
    OUTER = "outer"
    SEQUENCE = "sequence"
    PIPELINE = "pipeline"
    CFG = "cfg"
    PEERS = "peers"
    EXPERT = "expert"
    SHARD = "shard"
    WORLD = "world"
    VAE = "vae"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """How many ranks share what, under the names of the settings.

    `sequence_parallel_size` is the number of ranks that share tokens; None: ulysses_degree * ring_degree. Of those,
    what Ulysses leaves fetch keys and values from each other, unless `ring_degree` makes them a ring. The ranks of
    `vae_patch_parallel_size` and of `use_hsdp` are the same ones as those of the others. `hsdp_shard_size`: how many
    have each weight once between them; None: all that share tokens.
    """

    tensor_parallel_size: int = 1
    ulysses_degree: int = 1
    ring_degree: int = 1
    sequence_parallel_size: int | None = None
    cfg_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    vae_patch_parallel_size: int = 1
    use_hsdp: bool = False
    hsdp_shard_size: int | None = None
    enable_expert_parallel: bool = False

    @property
    def sequence(self) -> int:
        """Ranks that share the tokens of a row."""
        return self.sequence_parallel_size or self.ulysses_degree * self.ring_degree

    @property
    def outer(self) -> int:
        """Ranks that share them and are not Ulysses': they fetch keys and values, or are a ring."""
        return self.sequence // self.ulysses_degree

    @property
    def shard(self) -> int:
        """Ranks that have each weight of a block once between them; 1 where each has all of them."""
        return self.hsdp_shard_size or self.sequence if self.use_hsdp else 1

    @property
    def world(self) -> int:
        """All ranks of the model."""
        return self.tensor_parallel_size * self.sequence * self.pipeline_parallel_size * self.cfg_parallel_size


MEMBERS: Mapping[Axis, tuple[Axis, ...]] = {
    Axis.TENSOR: (Axis.TENSOR,),
    Axis.ULYSSES: (Axis.ULYSSES,),
    Axis.OUTER: (Axis.OUTER,),
    Axis.SEQUENCE: (Axis.ULYSSES, Axis.OUTER),
    Axis.PIPELINE: (Axis.PIPELINE,),
    Axis.CFG: (Axis.CFG,),
    Axis.PEERS: (Axis.TENSOR, Axis.ULYSSES, Axis.OUTER),
    Axis.WORLD: (Axis.TENSOR, Axis.ULYSSES, Axis.OUTER, Axis.PIPELINE, Axis.CFG),
}
"""Along which dimensions of the world the ranks of a group differ."""


def layout(world: int, sizes: ParallelSizes) -> Mapping[Axis, Groups]:
    """The groups of each axis. Neighboring ranks share weights, then heads (Ulysses), then keys and values, then
    blocks, then guidance branches: what talks most is closest together.

    Raises ConfigError where the sizes do not make up `world` ranks.
    """
    if sizes.world != world:
        rule = f"the sizes make up {sizes.world} ranks, and there are {world}"
        raise ConfigError(rule, violations=(Violation("world_size", rule),))
    dimensions = {
        Axis.TENSOR: sizes.tensor_parallel_size,
        Axis.ULYSSES: sizes.ulysses_degree,
        Axis.OUTER: sizes.outer,
        Axis.PIPELINE: sizes.pipeline_parallel_size,
        Axis.CFG: sizes.cfg_parallel_size,
    }
    strides = dict(zip(dimensions, itertools.accumulate((1, *dimensions.values()), lambda a, b: a * b), strict=False))

    def along(axes: tuple[Axis, ...]) -> Groups:
        places = {axis: [strides[axis] * place for place in range(size)] for axis, size in dimensions.items()}
        steps = [places[axis] for axis in dimensions if axis in axes]
        others = [places[axis] for axis in dimensions if axis not in axes]
        starts = sorted(map(sum, itertools.product(*others)))
        return tuple(tuple(sorted(start + sum(step) for step in itertools.product(*steps))) for start in starts)

    groups = {axis: along(axes) for axis, axes in MEMBERS.items()}
    alone = tuple((rank,) for rank in range(world))
    groups[Axis.SHARD] = tuple(
        peers[first : first + sizes.shard]
        for peers in groups[Axis.PEERS]
        for first in range(0, len(peers), sizes.shard)
    )
    groups[Axis.EXPERT] = groups[Axis.PEERS] if sizes.enable_expert_parallel else alone
    decoding = math.gcd(sizes.vae_patch_parallel_size, world)
    groups[Axis.VAE] = tuple(tuple(range(first, first + decoding)) for first in range(0, world, decoding))
    return groups
