"""Pipeline parallel: each rank has a range of the blocks of the main stack, and passes the tokens on to the next one.

What is around the blocks (embedders, modulation, text, the last layer) is on every rank, and so is the result. One
batch is computed at a time, so that one rank computes while the others wait: this saves memory, and no time.
"""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch import nn

from omni_grpc.features import Context
from omni_grpc.nn.linear import AnyLinear, Elsewhere
from omni_grpc.nn.rows import Rows
from omni_grpc.nn.stack import Block, Carry, RunBlocks, Stack, main_stack
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.ranks import Axis

__all__ = ["apply"]


def apply(module: nn.Module, config: object, context: Context) -> None:
    """Spreads the blocks of the main stack over the ranks of "pipeline", before they get their weights. Raises
    ConfigError where there are fewer blocks than ranks.
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
    stack.wrap(functools.partial(_passed_on, bounds, group))


def _leave(module: nn.Module, block: Block) -> None:
    """Takes away the layers that another rank's block runs with. Those that run ahead of the steps stay."""
    for name, child in list(module.named_children()):
        if not isinstance(child, AnyLinear):
            _leave(child, block)
        elif child.stream in block.carry:
            module.set_submodule(name, Elsewhere(child))


def _passed_on(bounds: list[int], group: dist.ProcessGroup, run: RunBlocks) -> RunBlocks:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    peers = [dist.get_global_rank(group, each) for each in range(size)]

    def passed_on(stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        # a rank has a turn if it has some of these blocks
        turns = [each for each in range(size) if max(lo, bounds[each]) < min(hi, bounds[each + 1])]
        if not turns:
            return run(stack, lo, hi, carry, rows)
        if rank in turns:
            turn = turns.index(rank)
            start, end = max(lo, bounds[rank]), min(hi, bounds[rank + 1])
            if turn:
                carry = _empty(stack.block(start - 1), carry, rows)
                for x in carry.values():
                    dist.recv(x, peers[turns[turn - 1]], group=group)
            carry = run(stack, start, end, carry, rows)
            if turn + 1 < len(turns):
                for x in carry.values():
                    dist.send(x.contiguous(), peers[turns[turn + 1]], group=group)
        if rank == turns[-1]:
            carry = {name: x.contiguous() for name, x in carry.items()}
        else:
            carry = _empty(stack.block(hi - 1), carry, rows)
        for x in carry.values():
            dist.broadcast(x, peers[turns[-1]], group=group)
        return carry

    return passed_on


def _empty(block: Block, like: Carry, rows: Rows) -> Carry:
    """Room for what a block makes of these rows."""
    one = next(iter(like.values()))
    return {name: one.new_empty(rows.stream(name).total, *one.shape[1:]) for name in block.carry}
