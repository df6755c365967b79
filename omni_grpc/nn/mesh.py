"""Mesh: the ranks that this process works with, by what they share. `join` makes it once torch.distributed is up.

    torch.distributed.init_process_group(...)
    mesh = join(ParallelSizes(tensor_parallel_size=2, ulysses_degree=2))     # on each of four processes

worker/edits.py applies the features of a mesh in their order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from omni_grpc.types.errors import ConfigError
from omni_grpc.types.ranks import Axis, ParallelSizes, layout

__all__ = ["Mesh", "join"]

T = TypeVar("T")

APART = frozenset({Axis.VAE, Axis.SHARD})
"""Axes with a group by themselves. Decodes run beside steps, and the order of calls in a group has to be the same on
all of its ranks. The messages of a group go one after the other: those of a block's attention would wait for the
weights of the next block.
"""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Mesh:
    """The groups of this process. rank: of `sizes.world`, -1 for a process that is none of them. groups: those of more
    than one rank.
    """

    sizes: ParallelSizes
    rank: int
    groups: Mapping[Axis, ProcessGroup]

    def of(self, axis: Axis, what: str) -> ProcessGroup:
        """The ranks of an axis. Raises ConfigError where this rank is alone: `what` needs others."""
        if axis not in self.groups:
            raise ConfigError(f"{what}, and there is one")
        return self.groups[axis]

    def agree(self, x: Tensor) -> Tensor:
        """What the first of the ranks that have the same rows has for x, [...], for a decision that all of them have to
        make alike. In place.
        """
        for axis in (Axis.PEERS, Axis.PIPELINE):
            if axis in self.groups:
                dist.broadcast(x, group=self.groups[axis], group_src=0)
        return x

    def first_says(self, decision: bool, device: torch.device) -> bool:
        """The decision of rank 0, for one that depends on a process's clock and that all ranks have to make alike."""
        if Axis.WORLD not in self.groups:
            return decision
        said = torch.tensor([int(decision)], device=device)
        dist.broadcast(said, group=self.groups[Axis.WORLD], group_src=0)
        return bool(said.item())

    def all_say(self, decision: bool, device: torch.device) -> bool:
        """Whether all ranks have decided so, for what each finds out by itself and all have to go by."""
        if Axis.WORLD not in self.groups:
            return decision
        said = torch.tensor([int(decision)], device=device)
        dist.all_reduce(said, dist.ReduceOp.MIN, group=self.groups[Axis.WORLD])
        return bool(said.item())

    def first_gives(self, x: T) -> T:
        """What rank 0 has for x, which is pickled: for what a process has measured and all ranks have to go by."""
        if Axis.WORLD not in self.groups:
            return x
        given = [x]
        dist.broadcast_object_list(given, group=self.groups[Axis.WORLD], group_src=0)
        return given[0]


def join(sizes: ParallelSizes, members: Sequence[int] | None = None) -> Mesh:
    """The mesh of this process, with the process groups that it takes. To be called by all processes at once, after
    `torch.distributed.init_process_group`. members: those of them that are the ranks of the model; None: all.

    Ranks that are together on several axes have one group for them, but for those of APART.

    Raises ConfigError where the sizes do not make up the number of ranks.
    """
    world = tuple(range(dist.get_world_size()) if members is None else members)
    me = dist.get_rank()
    made: dict[tuple[tuple[int, ...], Axis | None], ProcessGroup] = {}
    groups: dict[Axis, ProcessGroup] = {}
    for axis, of_axis in layout(len(world), sizes).items():
        for group in of_axis:
            key = tuple(world[rank] for rank in group), axis if axis in APART else None
            if len(group) > 1 and key not in made:
                made[key] = dist.new_group(key[0])
            if len(group) > 1 and me in key[0]:
                groups[axis] = made[key]
    return Mesh(sizes=sizes, rank=world.index(me) if me in world else -1, groups=groups)
