"""Sharded weights (https://arxiv.org/abs/1910.02054, stage 3): of each linear layer of the blocks a rank keeps a part,
and has the whole only while its block runs.

A block's parts are gathered by one all-gather, which starts while the block before computes. What is computed is what
one process computes, bit for bit. To be applied before weights are loaded: each is cut as it is loaded, so a rank never
has all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.features import Context
from omni_grpc.nn.linear import AnyLinear
from omni_grpc.nn.rows import Rows
from omni_grpc.nn.stack import Block, Carry, RunBlocks, Stack
from omni_grpc.types.ranks import Axis

__all__ = ["apply"]


def apply(module: nn.Module, config: object, context: Context, *, overlap: bool = True) -> None:
    """Wraps every stack and the innermost linear layers of its blocks. All ranks of "shard" have to run the same blocks
    in the same order. Without `overlap`, a block's weights are gathered after the block before.
    """
    group = context.group(Axis.SHARD, "use_hsdp needs ranks to share weights")
    for stack in [part for part in module.modules() if isinstance(part, Stack)]:
        blocks = [_wrap(block, group) for name in stack.groups for block in stack.group(name)]
        stack.wrap(ShardedBlocks(blocks, group, overlap).around)


def _wrap(block: Block, group: dist.ProcessGroup) -> list[Sharded]:
    """The layers that the block runs with. Those of a stream that it does not carry (the timestep, a text) run ahead of
    the steps, and gather their weights when they are called.
    """
    layers = [
        (path, part)
        for path, part in block.named_modules()
        if isinstance(part, AnyLinear) and not any(isinstance(inner, AnyLinear) for inner in part.children())
    ]
    wrapped = []
    for path, layer in layers:
        sharded = Sharded(layer, group)
        block.set_submodule(path, sharded)
        if layer.stream in block.carry:
            wrapped.append(sharded)
    return wrapped


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a tensor, in bytes, padded so that all ranks have as much; and what the tensor is."""

    mine: Tensor
    shape: torch.Size
    dtype: torch.dtype

    def whole(self, gathered: Tensor) -> Tensor:
        """The tensor, of uint8 [ranks, bytes of each]."""
        count = self.shape.numel() * self.dtype.itemsize
        out: Tensor = gathered.reshape(-1)[:count].view(self.dtype).view(self.shape)
        return out


class Sharded(AnyLinear):
    """A linear layer of which this rank keeps a part. Its parameters are empty while it is not in use."""

    def __init__(self, base: AnyLinear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features, self.stream = base.in_features, base.out_features, base.stream
        self.parts: dict[str, Part] = {}
        self._group, self._size, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._shapes = base.shapes()
        self._here = False

    @property
    def activation_dtype(self) -> torch.dtype | None:
        return self.base.activation_dtype

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]. Gathers the parameters first, unless they are there."""
        with self._gathered():
            out: Tensor = self.base(x)
            return out

    def gelu(self, x: Tensor) -> Tensor:
        """GELU (tanh) of `self(x)`, [T, in] -> [T, out]. Gathers the parameters first, like `forward`."""
        with self._gathered():
            return self.base.gelu(x)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Loads weight [out, in] or bias [out] into the wrapped layer, and keeps this rank's part of what it holds."""
        self.base.load_tensor(name, tensor)
        for leaf, parameter in list(self.base.named_parameters()):
            if parameter.numel() and not parameter.is_meta:
                self.parts[leaf] = part = self._cut(parameter.detach())
                # a buffer, so that it moves where a model's weights are moved
                self.register_buffer(f"part_{leaf.replace('.', '_')}", part.mine, persistent=False)
                self._put(leaf, torch.empty(0, dtype=parameter.dtype, device=parameter.device))

    def _cut(self, whole: Tensor) -> Part:
        flat = whole.contiguous().view(-1).view(torch.uint8)
        # parts of 16 bytes, so that a gathered tensor of any dtype begins where it can be read
        size = -(-flat.numel() // (16 * self._size)) * 16
        mine = flat.new_zeros(size)
        own = flat[self._rank * size : (self._rank + 1) * size]
        mine[: len(own)] = own
        return Part(mine, whole.shape, whole.dtype)

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        if self._here:
            yield
            return
        coming = {leaf: _gather(part.mine, self._size, self._group) for leaf, part in self.parts.items()}
        for _, work in coming.values():
            work.wait()
        with self.present({leaf: gathered for leaf, (gathered, _) in coming.items()}):
            yield

    @contextlib.contextmanager
    def present(self, gathered: Mapping[str, Tensor]) -> Iterator[None]:
        """Makes the layer usable inside the `with` block; gathered: uint8 [ranks, bytes of each], by parameter."""
        for leaf, part in self.parts.items():
            self._put(leaf, part.whole(gathered[leaf]))
        self._here = True
        try:
            yield
        finally:
            self._here = False
            for leaf, part in self.parts.items():
                self._put(leaf, part.mine.new_empty(0, dtype=part.dtype))

    def _put(self, leaf: str, tensor: Tensor) -> None:
        path, _, name = leaf.rpartition(".")
        setattr(self.base.get_submodule(path), name, nn.Parameter(tensor, requires_grad=False))


def _gather(mine: Tensor, size: int, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Starts to gather what each rank has, uint8 [bytes] -> [ranks, bytes]."""
    out = mine.new_empty(size * len(mine))
    # torch 2.13 calls all_gather_into_tensor by another name, and warns of the old one
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(out, mine, group=group, async_op=True)
    return out.view(size, -1), work


class ShardedBlocks:
    """Runs a stack block by block, each with its whole weights."""

    def __init__(self, blocks: Sequence[list[Sharded]], group: dist.ProcessGroup, overlap: bool = True) -> None:
        self.blocks, self.group, self.size = blocks, group, dist.get_world_size(group)
        self.overlap = overlap
        # a stack that is a part of prepare may be run by two lanes
        self._lock = threading.Lock()

    def around(self, run: RunBlocks) -> RunBlocks:
        return functools.partial(self.run, run)

    def run(self, inner: RunBlocks, stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        with self._lock:
            coming = None
            for number in range(lo, hi):
                gathered, work = coming or self._begin(number)
                work.wait()
                # the next one's weights come while this one computes
                coming = self._begin(number + 1) if self.overlap and number + 1 < hi else None
                with self._present(number, gathered):
                    carry = inner(stack, number, number + 1, carry, rows)
        return carry

    def _begin(self, number: int) -> tuple[Tensor, dist.Work]:
        """Starts to gather the parts of a block, end to end."""
        parts = [part.mine for layer in self.blocks[number] for part in layer.parts.values()]
        return _gather(torch.cat(parts), self.size, self.group)

    @contextlib.contextmanager
    def _present(self, number: int, gathered: Tensor) -> Iterator[None]:
        at = 0
        with contextlib.ExitStack() as held:
            for layer in self.blocks[number]:
                found = {}
                for leaf, part in layer.parts.items():
                    found[leaf] = gathered[:, at : at + len(part.mine)]
                    at += len(part.mine)
                held.enter_context(layer.present(found))
            yield
