"""By how much what a row is judged by has changed since an earlier evaluation."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from omni_grpc.features.step_cache.memory import Memory
from omni_grpc.features.step_cache.policies import Policy
from omni_grpc.nn.mesh import Mesh
from omni_grpc.nn.rows import Rows
from omni_grpc.ops.cache import compare_store
from omni_grpc.ops.readback import read_back
from omni_grpc.pipeline.state import State


def changes(
    now: Mapping[int, Tensor],
    policies: Sequence[Policy | None],
    memories: Sequence[Memory | None],
    rows: Rows,
    ranks: Mesh | None,
) -> tuple[dict[int, float], dict[int, Tensor]]:
    """Compares rows with what their memories have of them: row -> a tensor [T, C] that it is judged by.

    Returns the relative change |now - before| / |before| in the L1 norm of those that have something to be compared
    with, and what to compare the next evaluation with: tensors that own their memory. One kernel for each kind of
    tensor, and one read from the device for all. Ranks that have the same rows get the same numbers.
    """
    sums: Tensor | None = None
    kept: dict[int, Tensor] = {}
    for places in _alike(now):
        packed = now[places[0]] if len(places) == 1 else torch.cat([now[row] for row in places])
        offsets = [0]
        for row in places:
            offsets.append(offsets[-1] + len(now[row]))
        buffers = [_buffer(now[row], policies[row], memories[row]) for row in places]
        found = compare_store(packed, buffers, offsets, [_before(memories[row]) is not None for row in places])
        kept |= dict(zip(places, buffers, strict=True))
        if len(places) < len(rows):
            # a row is in one kind alone, the others have zeros
            spread = found.new_zeros(len(rows), 2)
            spread[places] = found
            found = spread
        sums = found if sums is None else sums + found
    known = [row for row in now if _before(memories[row]) is not None]
    if sums is None or not known:
        return {}, kept
    sums = rows.totals(sums)
    if ranks is not None:
        ranks.agree(sums)
    read = read_back(sums)
    return {row: read[row][0] / read[row][1] if read[row][1] else math.inf for row in known}, kept


def _alike(now: Mapping[int, Tensor]) -> list[list[int]]:
    """The rows, in groups of those whose tensors can be packed."""
    groups: dict[tuple[torch.dtype, int], list[int]] = collections.defaultdict(list)
    for row, x in now.items():
        groups[x.dtype, x.shape[1]].append(row)
    return list(groups.values())


def _before(memory: Memory | None) -> Tensor | None:
    return None if memory is None else memory.compared


def _buffer(now: Tensor, policy: Policy | None, memory: Memory | None) -> Tensor:
    """What a row was, to be overwritten with what it is; of a policy that may need it again, a copy."""
    before = _before(memory)
    if before is None:
        return torch.empty_like(now, memory_format=torch.contiguous_format)
    return before.clone() if policy is not None and policy.since_computed else before


def timestep_changes(state: State, branch: str, group: str) -> list[float]:
    """The relative change of a row's modulation from one evaluation to the next, for all of the schedule; 0 first.

    It depends on the timesteps alone, so that everything that goes by it is known before the first step.
    """
    tables = state.cond[branch].tables[group].float().flatten(1)
    moved = (tables[1:] - tables[:-1]).abs().sum(1)
    before = tables[:-1].abs().sum(1)
    return [0.0, *(moved / before.clamp_min(torch.finfo(torch.float32).tiny)).tolist()]
