"""TeaCache (https://arxiv.org/abs/2411.19108, section 3.3): a row whose first input has hardly changed since the last
evaluation reuses the residual that the blocks added then, and the blocks run for the other rows only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from omni_grpc.config import CacheConfig
from omni_grpc.features import Context
from omni_grpc.nn.mesh import Mesh
from omni_grpc.nn.rows import Rows
from omni_grpc.nn.stack import Carry, RunBlocks, Stack, convert, main_stack
from omni_grpc.ops.cache import compare_store
from omni_grpc.ops.readback import read_back
from omni_grpc.pipeline.state import State
from omni_grpc.types.step_cache import CacheCount, tally


def apply(module: nn.Module, config: CacheConfig, context: Context) -> None:
    """Puts a cache around the main stack. Request.cache says whether it is used, and up to which threshold."""
    path, stack = main_stack(module)
    stack.wrap(StepCache(context.component, path, context.ranks).around)


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What is kept of one row between evaluations: the signal [T, C], the residual that the blocks last added to each
    stream, and the change that has accumulated since.
    """

    segment: int
    evaluation: int
    signal: Tensor
    residual: Carry
    drift: float


class StepCache:
    """The cache of one stack. It decides for each row separately, and keeps what it knows of a row in its state. Ranks
    that compute the same rows go by the numbers of the first of them: one that ran blocks that the others skip would
    wait for them forever.
    """

    def __init__(self, component: str, path: str, ranks: Mesh | None = None) -> None:
        self.component, self.ranks = component, ranks
        self.slot = f"step_cache {component}.{path}"

    def around(self, run: RunBlocks) -> RunBlocks:
        return functools.partial(self.run, run)

    def run(self, inner: RunBlocks, stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        if all(state.request.cache is None for state, _ in rows.owners):
            return inner(stack, lo, hi, carry, rows)
        stream, signal = stack.signal(lo, carry, rows)
        memories = [self._recall(state, branch) for state, branch in rows.owners]
        signals = _signal_buffers(rows, stream, signal, memories)
        changes = self._changes(rows, stream, signal, signals, memories)
        drifts = [
            _drift(state, memory, change)
            for (state, _), memory, change in zip(rows.owners, memories, changes, strict=True)
        ]
        live = tuple(row for row, drift in enumerate(drifts) if drift is None)
        before = {name: rows.stream(name).split(x) for name, x in carry.items()}
        after: dict[str, list[Tensor]] = {name: list(parts) for name, parts in before.items()}
        computed = carry
        if live:
            part = rows.narrow(live)
            taken = {name: rows.stream(name).take(x, live) for name, x in carry.items()}
            computed = convert(inner(stack, lo, hi, taken, part), tuple(carry), part)
            for name, x in computed.items():
                for row, y in zip(live, part.stream(name).split(x), strict=True):
                    after[name][row] = y
        for row, (state, branch) in enumerate(rows.owners):
            if state.request.cache is None:
                continue
            memory, drift = memories[row], drifts[row]
            if memory is not None and drift is not None:
                residual = memory.residual
                for name in carry:
                    after[name][row] = before[name][row] + residual[name]
            else:
                residual = {name: after[name][row] - before[name][row] for name in carry}
            state.slots[self.slot, branch] = Memory(
                state.segment, state.evaluation, signals[row], residual, drift or 0.0
            )
            self._count(state, branch, hit=drift is not None, change=changes[row])
        if len(live) == len(rows):
            return computed
        return {name: torch.cat(parts) for name, parts in after.items()}

    def _recall(self, state: State, branch: str) -> Memory | None:
        """What is kept of a row from the evaluation right before this one, else None. A branch that guidance left out
        in between, and an evaluation that is repeated because it failed for another row, start afresh: the signal is
        about to be overwritten, so nothing is kept until the evaluation has ended.
        """
        memory: Memory | None = state.slots.pop((self.slot, branch), None)
        if memory is None or (memory.segment, memory.evaluation) != (state.segment, state.evaluation - 1):
            return None
        return memory

    def _changes(
        self, rows: Rows, stream: str, signal: Tensor, signals: Sequence[Tensor], memories: Sequence[Memory | None]
    ) -> list[float | None]:
        """For each row that is kept, the relative change |now - before| / |before| in the L1 norm: the one read from
        the device. `signals` hold the signal of before, and afterwards that of now.
        """
        known = [memory is not None for memory in memories]
        sums = compare_store(signal, signals, rows.stream(stream).offsets, known)
        if not any(known):
            return [None] * len(rows)
        sums = rows.totals(sums)
        if self.ranks is not None:
            self.ranks.agree(sums)
        return [
            None if not is_known else moved / norm if norm else math.inf
            for is_known, (moved, norm) in zip(known, read_back(sums), strict=True)
        ]

    def _count(self, state: State, branch: str, *, hit: bool, change: float | None) -> None:
        count = CacheCount(
            component=self.component,
            hits=int(hit),
            misses=int(not hit),
            measured=int(change is not None),
            change=change or 0.0,
        )
        tally(state.reports, (self.slot, branch), count)


def _signal_buffers(rows: Rows, stream: str, signal: Tensor, memories: Sequence[Memory | None]) -> list[Tensor]:
    """The buffer for the signal of each row: that of the evaluation before, or a new one; empty for a request without a
    cache.
    """
    return [
        signal.new_empty(0)
        if state.request.cache is None
        else memory.signal
        if memory is not None
        else signal.new_empty(length, signal.shape[1])
        for (state, _), memory, length in zip(rows.owners, memories, rows.stream(stream).lengths, strict=True)
    ]


def _drift(state: State, memory: Memory | None, change: float | None) -> float | None:
    """The accumulated change where the row's blocks may be skipped, None where they must run: always in the first and
    in the last step.
    """
    cache = state.request.cache
    if cache is None or memory is None or change is None or state.index in (0, state.schedule.steps - 1):
        return None
    foretold = 0.0
    for coefficient in cache.coefficients:
        foretold = foretold * change + coefficient
    drift = memory.drift + abs(foretold)
    return drift if drift < cache.rel_l1_thresh else None
