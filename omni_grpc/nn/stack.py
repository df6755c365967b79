"""Stack: the only loop over blocks, and the seam of caches, sequence and pipeline parallelism and layerwise offload."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import JOINT, Rows

Carry = dict[str, Tensor]
"""What goes from block to block: one packed tensor [T_s, C] per stream."""

RunBlocks = Callable[["Stack", int, int, Carry, Rows], Carry]
"""Blocks lo to hi (excluded) of a stack, applied to a carry."""


class Block(nn.Module, abc.ABC):
    """One transformer block.

    carry: the streams that `forward` takes and returns, in that order.
    constants: what it reads besides that does not depend on the latents (the keys and values of a text, for example).
    The rows have one tensor bound under each name, [T_s, blocks of the group, ...]; `forward` gets its block's part.
    """

    carry: tuple[str, ...]
    constants: tuple[str, ...] = ()

    @abc.abstractmethod
    def modulation(self, temb: Tensor) -> Tensor:
        """The timestep's embedding as the model feeds it to its blocks, [S, C] -> this block's modulation [S, kC].

        `temb` itself where all blocks share one.
        """

    @abc.abstractmethod
    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        """`mod` [M, kC] is this block's part of the modulation of the batch. A block never learns its own number."""

    def signal(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> Tensor:
        """A tensor [T, C] over the last stream of `carry` that changes from step to step as what the whole stack adds
        does, asked of a stack's first block. It gets what `forward` gets.

        Here it is what the block adds to that stream, which costs the block. A block that has its first modulated input
        at hand gives that: it costs next to nothing, and is what published coefficients are fitted to.
        """
        out: tuple[Tensor, ...] = self(*carry, rows=rows, mod=mod, **constants)
        return out[-1] - carry[-1]


class Stack(nn.Module):
    """Groups of like blocks under one numbering: `Stack(dual=[...], single=[...])`.

    The rows have one tensor bound under each group's name, [M, blocks of the group, kC], or [M, 1, kC] where the blocks
    share one modulation. Where the carry of a group differs from that of the one before, the stack joins or splits the
    streams, so a middleware spans all groups without knowing of them.
    """

    def __init__(self, **groups: Sequence[Block]) -> None:
        super().__init__()
        for name, blocks in groups.items():
            self.add_module(name, nn.ModuleList(blocks))
        self._where = [(name, place) for name, blocks in groups.items() for place in range(len(blocks))]
        self._run: RunBlocks = Stack.loop

    def __len__(self) -> int:
        return len(self._where)

    def wrap(self, middleware: Callable[[RunBlocks], RunBlocks]) -> None:
        """Puts a middleware around all that was wrapped before it."""
        self._run = middleware(self._run)

    def forward(self, carry: Carry, rows: Rows) -> Carry:
        """Runs every block. The carry goes as it came: the same streams, each in a tensor of its own."""
        return convert(self._run(self, 0, len(self), carry, rows), tuple(carry), rows)

    def loop(self, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        """The innermost run."""
        with activate(rows):
            for number in range(lo, hi):
                block, bound = self._block(number, rows)
                carry = convert(carry, block.carry, rows)
                out = block(*carry.values(), rows=rows, **bound)
                carry = dict(zip(block.carry, out, strict=True))
        return carry

    def signal(self, number: int, carry: Carry, rows: Rows) -> tuple[str, Tensor]:
        """The signal of one block before it runs, see Block.signal, and the stream that packs it."""
        block, bound = self._block(number, rows)
        with activate(rows):
            return block.carry[-1], block.signal(*convert(carry, block.carry, rows).values(), rows=rows, **bound)

    def block(self, number: int) -> Block:
        """A block by its number in the stack."""
        group, place = self._where[number]
        return self.group(group)[place]

    def _block(self, number: int, rows: Rows) -> tuple[Block, dict[str, Tensor]]:
        """A block, and its part of what is bound to the rows."""
        group, place = self._where[number]
        block = self.group(group)[place]
        bound = {name: rows[name][:, place] for name in block.constants}
        mod = rows[group]
        return block, {"mod": mod[:, place if mod.shape[1] > 1 else 0], **bound}

    def modulation(self, temb: Tensor) -> dict[str, Tensor]:
        """The timesteps' embeddings [S, C] -> for each group [S, blocks, kC].

        Of a group whose blocks all take `temb` as it is, one copy serves: [S, 1, kC].
        """
        tables = {}
        for name in self.groups:
            parts = [block.modulation(temb) for block in self.group(name)]
            shared = all(part is temb for part in parts)
            tables[name] = temb[:, None] if shared else torch.stack(parts, 1)
        return tables

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in self._where))

    def group(self, name: str) -> Sequence[Block]:
        """The blocks of one group, in order."""
        return cast(Sequence[Block], self.get_submodule(name))


def main_stack(module: nn.Module) -> tuple[str, Stack]:
    """The path and the stack of a denoiser's main part: the one with the most blocks. Refiners and embedders have few.

    Raises ValueError where there is none, or two of them are longest.
    """
    stacks = {path: part for path, part in module.named_modules() if isinstance(part, Stack)}
    longest = [path for path in stacks if len(stacks[path]) == max(map(len, stacks.values()))]
    if len(longest) != 1:
        found = ", ".join(longest) or "none"
        raise ValueError(f"{type(module).__name__} has no single longest stack of blocks: {found}")
    return longest[0], stacks[longest[0]]


def convert(carry: Carry, names: tuple[str, ...], rows: Rows) -> Carry:
    """The same tokens as the named streams: joined, split, or as they are."""
    if tuple(carry) == names:
        return carry
    if names == (JOINT,):
        return {JOINT: rows.join(carry)}
    parts = rows.split(carry[JOINT]) if JOINT in carry else carry
    return {name: parts[name] for name in names}
