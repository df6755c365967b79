"""Pipeline parallel (https://arxiv.org/abs/1811.06965): each rank has a range of the blocks of the main stack, and
passes the tokens on to the next one.

A batch is cut into micro-batches of whole rows, one for each rank at most: while a rank computes one of them, the rank
after it computes the one before. A batch of one row is computed by one rank after the other, which saves memory and no
time. What is around the blocks (embedders, modulation, text, the last layer) is on every rank, and so is the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.features import Context
from omni_grpc.nn.linear import AnyLinear, Elsewhere
from omni_grpc.nn.rows import JOINT, Rows, Stream
from omni_grpc.nn.stack import Block, Carry, RunBlocks, Stack, main_stack
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.ranks import Axis

__all__ = ["apply"]


def apply(module: nn.Module, config: object, context: Context, *, overlap: bool = True) -> None:
    """Spreads the blocks of the main stack over the ranks of "pipeline", before they get their weights; without
    `overlap`, whole batches are passed on. Raises ConfigError where there are fewer blocks than ranks.
    """
    group = context.group(Axis.PIPELINE, "pipeline parallel needs ranks to share blocks")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    path, stack = main_stack(module)
    if len(stack) < size:
        name = f"{context.component}.{path}".rstrip(".")
        most = f"use a pipeline_parallel_size of {len(stack)} at most"
        raise ConfigError(f"{name} has {len(stack)} blocks, fewer than {size} ranks; {most}")
    bounds = [len(stack) * each // size for each in range(size + 1)]
    for number in range(len(stack)):
        if not bounds[rank] <= number < bounds[rank + 1]:
            block = stack.block(number)
            _leave(block, block)
    stack.wrap(Stages(bounds, group, overlap).around)


def _leave(module: nn.Module, block: Block) -> None:
    """Takes away the layers that another rank's block runs with. Those that run ahead of the steps stay."""
    for name, child in list(module.named_children()):
        if not isinstance(child, AnyLinear):
            _leave(child, block)
        elif child.stream in block.carry:
            module.set_submodule(name, Elsewhere(child))


def _micro_batches(tokens: Sequence[int], most: int) -> list[range]:
    """Rows with so many tokens each in parts of neighboring rows, `most` at most: the largest part has as few tokens as
    can be, and there are no more parts than that takes.
    """
    low, high = max(tokens), sum(tokens)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(tokens, middle)) > most:
            low = middle + 1
        else:
            high = middle
    return _filled(tokens, low)


def _filled(tokens: Sequence[int], room: int) -> list[range]:
    """Neighboring rows together as long as there is room for their tokens; none has more than that."""
    parts, first, taken = [], 0, 0
    for row, count in enumerate(tokens):
        if taken + count > room:
            parts.append(range(first, row))
            first, taken = row, 0
        taken += count
    return [*parts, range(first, len(tokens))]


@dataclasses.dataclass(frozen=True, slots=True)
class Passing:
    """A micro-batch on its way, from rank to rank. `carry` is kept until it has left."""

    carry: Carry
    work: Sequence[dist.Work | None]

    def wait(self) -> Carry:
        """The carry, once it is here, or has left."""
        for each in self.work:
            if each is not None:
                each.wait()
        return self.carry


class Stages:
    """Runs a stack of which each rank of a group has a range of blocks: rank r those from bounds[r] on.

    All ranks cut a batch alike and go through the parts in the same order. A rank waits for nobody but the ones before
    it, until it has computed its last part: what it makes leaves while it goes on, and what it needs next is on its way
    while it computes. Then the last one's results come, part by part. Empty tensors are not sent.
    """

    def __init__(self, bounds: Sequence[int], group: dist.ProcessGroup, overlap: bool) -> None:
        self.bounds, self.group, self.overlap = bounds, group, overlap
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.peers = [dist.get_global_rank(group, each) for each in range(self.size)]

    def around(self, run: RunBlocks) -> RunBlocks:
        return functools.partial(self.run, run)

    def run(self, inner: RunBlocks, stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        spans = self._spans(lo, hi)
        turns = list(spans)
        if not turns:
            return inner(stack, lo, hi, carry, rows)
        parts = self._cut(rows, len(turns))
        out = _empty(stack.block(hi - 1), carry, rows)
        views = [{name: x[_span(rows.stream(name), part)] for name, x in out.items()} for part in parts]
        # what is on its way to another rank, and what comes back from the last one
        sent: list[Passing] = []
        shared: list[Passing] = []
        if self.rank in turns:
            mine, turn = spans[self.rank], turns.index(self.rank)
            batches = [rows.narrow(part) for part in parts]
            coming = self._receive(0, stack, mine.start, carry, batches, turns[:turn])
            for number, (part, batch) in enumerate(zip(parts, batches, strict=True)):
                if coming is None:
                    given = {name: rows.stream(name).take(x, part) for name, x in carry.items()}
                else:
                    given = coming.wait()
                    coming = self._receive(number + 1, stack, mine.start, carry, batches, turns[:turn])
                made = inner(stack, mine.start, mine.stop, given, batch)
                if self.rank == turns[-1]:
                    for name, x in made.items():
                        views[number][name].copy_(x)
                    shared.append(self._share(views[number], turns[-1]))
                else:
                    sent.append(self._send(number, made, turns[turn + 1]))
        if self.rank != turns[-1]:
            shared = [self._share(view, turns[-1]) for view in views]
        for each in (*shared, *sent):
            each.wait()
        return out

    def _spans(self, lo: int, hi: int) -> dict[int, range]:
        """Which of the blocks from lo to hi each rank has, for those that have some, in the order of their turns."""
        owned = {rank: range(max(lo, self.bounds[rank]), min(hi, self.bounds[rank + 1])) for rank in range(self.size)}
        return {rank: span for rank, span in owned.items() if span}

    def _cut(self, rows: Rows, most: int) -> list[range]:
        """The micro-batches of some rows, for so many ranks. They go by the tokens of all ranks: those that share
        tokens have to cut alike.
        """
        if not self.overlap:
            most = 1
        whole = rows
        while whole.exchange is not None:
            whole = whole.whole
        return _micro_batches(whole.stream(JOINT).lengths, most)

    def _receive(
        self, number: int, stack: Stack, start: int, like: Carry, batches: Sequence[Rows], before: Sequence[int]
    ) -> Passing | None:
        """Begins to receive a micro-batch, as it goes into block `start`, from the last of the ranks before this one.
        None: there is none, or no such micro-batch.
        """
        if not before or number == len(batches):
            return None
        carry = _empty(stack.block(start - 1), like, batches[number])
        work = [dist.irecv(x, self.peers[before[-1]], group=self.group, tag=tag) for tag, x in _messages(number, carry)]
        return Passing(carry, work)

    def _send(self, number: int, carry: Carry, rank: int) -> Passing:
        carry = {name: x.contiguous() for name, x in carry.items()}
        work = [dist.isend(x, self.peers[rank], group=self.group, tag=tag) for tag, x in _messages(number, carry)]
        return Passing(carry, work)

    def _share(self, carry: Carry, rank: int) -> Passing:
        """Begins to give what one rank has to all of them, in place."""
        work = [dist.broadcast(x, self.peers[rank], group=self.group, async_op=True) for _, x in _messages(0, carry)]
        return Passing(carry, work)


def _messages(number: int, carry: Carry) -> list[tuple[int, Tensor]]:
    """What there is to send of a micro-batch, each with a number that tells it from all others of the batch."""
    return [(number * len(carry) + place, x) for place, x in enumerate(carry.values()) if x.numel()]


def _span(stream: Stream, rows: range) -> slice:
    """The tokens of neighboring rows."""
    return slice(stream.offsets[rows.start], stream.offsets[rows.stop])


def _empty(block: Block, like: Carry, rows: Rows) -> Carry:
    """Room for what a block makes of these rows."""
    one = next(iter(like.values()))
    return {name: one.new_empty(rows.stream(name).total, *one.shape[1:]) for name in block.carry}
