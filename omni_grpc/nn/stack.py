"""Stack: the only loop over blocks, and the seam of caches, sequence and pipeline parallelism and layerwise offload."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import JOINT, Rows

Carry = dict[str, Tensor]
"""What goes from block to block: one packed tensor [T_s, C] per stream."""

Run = Callable[["Stack", int, int, Carry, Rows], Carry]
"""Blocks lo to hi (excluded) of a stack, applied to a carry."""


class Block(nn.Module, abc.ABC):
    """One transformer block. `carry` names the streams that `forward` takes and returns, in that order."""

    carry: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def modulation(self, temb: Tensor) -> Tensor:
        """silu(timestep embedding) [S, C] -> this block's modulation vectors [S, kC]."""

    @abc.abstractmethod
    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor) -> tuple[Tensor, ...]:
        """`mod` [M, kC] is this block's part of the modulation of the batch. A block never learns its own number."""


class Stack(nn.Module):
    """Groups of like blocks under one numbering: `Stack(dual=[...], single=[...])`.

    The rows have one tensor bound under each group's name, [M, blocks of the group, kC]. Where the carry of a group
    differs from that of the one before, the stack joins or splits the streams, so a middleware spans all groups without
    knowing of them.
    """

    def __init__(self, **groups: Sequence[Block]) -> None:
        super().__init__()
        for name, blocks in groups.items():
            self.add_module(name, nn.ModuleList(blocks))
        self._where = [(name, place) for name, blocks in groups.items() for place in range(len(blocks))]
        self._run: Run = Stack.loop

    def __len__(self) -> int:
        return len(self._where)

    def wrap(self, middleware: Callable[[Run], Run]) -> None:
        """Puts a middleware around all that was wrapped before it."""
        self._run = middleware(self._run)

    def forward(self, carry: Carry, rows: Rows) -> Carry:
        """Runs every block. The carry comes and goes as one tensor per stream."""
        return convert(self._run(self, 0, len(self), carry, rows), rows.layout.names, rows)

    def loop(self, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        """The innermost run."""
        with activate(rows):
            for number in range(lo, hi):
                group, place = self._where[number]
                block = self._group(group)[place]
                carry = convert(carry, block.carry, rows)
                out = block(*carry.values(), rows=rows, mod=rows[group][:, place])
                carry = dict(zip(block.carry, out, strict=True))
        return carry

    def modulation(self, temb: Tensor) -> dict[str, Tensor]:
        """silu(timestep embeddings) [S, C] -> for each group [S, blocks, kC]."""
        groups = dict.fromkeys(name for name, _ in self._where)
        return {name: torch.stack([block.modulation(temb) for block in self._group(name)], 1) for name in groups}

    def _group(self, name: str) -> Sequence[Block]:
        return cast(Sequence[Block], self.get_submodule(name))


def convert(carry: Carry, names: tuple[str, ...], rows: Rows) -> Carry:
    """The same tokens as the named streams: joined, split, or as they are."""
    if tuple(carry) == names:
        return carry
    if names == (JOINT,):
        return {JOINT: rows.join(carry)}
    parts = rows.split(carry[JOINT]) if JOINT in carry else carry
    return {name: parts[name] for name in names}
