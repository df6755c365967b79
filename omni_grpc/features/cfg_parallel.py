"""CFG parallel: each rank predicts some rows of a batch, so that a request's guidance branches run side by side.

All ranks have all states. The predictions are gathered, and every rank takes the same step of the same states. A row
stays with a rank until its segment ends, since that is where features keep what they know of it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from omni_grpc.features import Context
from omni_grpc.nn.rows import Rows
from omni_grpc.pipeline.base import Pipeline, Predict
from omni_grpc.pipeline.batch import LATENTS
from omni_grpc.types.ranks import Axis

__all__ = ["apply"]

SLOT = "cfg_parallel"
"""Where a state keeps the rank of each of its branches."""


def apply(pipeline: Pipeline, config: object, context: Context) -> None:
    """Spreads the rows of every prediction over the ranks of "cfg"."""
    group = context.group(Axis.CFG, "CFG parallel needs ranks to share guidance branches")
    pipeline.wrap_predict(BranchShares(group).around)


class BranchShares:
    """Which rank predicts which rows, and how the predictions come together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.like: Tensor | None = None
        """Of the width and dtype of a prediction, once there was one; it has no tokens."""

    def around(self, predict: Predict) -> Predict:
        def shared(rows: Rows) -> Tensor:
            owner = self.assign(rows)
            lengths = rows.stream(rows.bound[LATENTS][0]).lengths
            mine = [row for row, rank in enumerate(owner) if rank == self.rank]
            if mine:
                predicted = predict(rows.narrow(mine))
                self.like = predicted[:0]
            elif self.like is None:
                # the first batch ever has fewer rows than there are ranks: what a prediction looks like is not known
                self.like = predicted = predict(rows.narrow([0]))[:0]
            else:
                predicted = self.like
            counts = [sum(lengths[row] for row, rank in enumerate(owner) if rank == each) for each in range(self.size)]
            gathered = self._gather(predicted, counts)
            self._share_reports(rows, owner)
            parts: dict[int, Tensor] = {}
            for rank, x in enumerate(gathered):
                of_rank = [row for row, each in enumerate(owner) if each == rank]
                parts |= zip(of_rank, x.split([lengths[row] for row in of_rank]), strict=True)
            return torch.cat([parts[row] for row in range(len(rows))])

        return shared

    def assign(self, rows: Rows) -> list[int]:
        """The rank of each row: where it was before, else where there are the fewest tokens so far."""
        lengths = [sum(row.lengths) for row in rows.layout.rows]
        owner: list[int | None] = [state.slots.get((SLOT, branch)) for state, branch in rows.owners]
        tokens = [0] * self.size
        for rank, length in zip(owner, lengths, strict=True):
            if rank is not None:
                tokens[rank] += length
        found: list[int] = []
        for (state, branch), rank, length in zip(rows.owners, owner, lengths, strict=True):
            if rank is None:
                rank = state.slots[SLOT, branch] = tokens.index(min(tokens))
                tokens[rank] += length
            found.append(rank)
        return found

    def _gather(self, mine: Tensor, counts: list[int]) -> list[Tensor]:
        """[tokens of this rank, C] -> those of each rank. All send as much as the one that has most."""
        sent = mine.new_zeros(max(counts), *mine.shape[1:])
        sent[: len(mine)] = mine
        received = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(received, sent, group=self.group)
        return [x[:count] for x, count in zip(received, counts, strict=True)]

    def _share_reports(self, rows: Rows, owner: list[int]) -> None:
        """Tells all ranks what features report of each row: a report of a step is the whole batch's."""
        if all(state.request.cache is None for state, _ in rows.owners):
            return
        mine = [
            (number, key, state.reports[key])
            for number, (state, branch) in enumerate(rows.owners)
            if owner[number] == self.rank
            for key in state.reports
            if key[1] == branch
        ]
        everything: list[list[tuple[int, tuple[str, str], object]]] = [[] for _ in range(self.size)]
        dist.all_gather_object(everything, mine, group=self.group)
        for state, _ in rows.owners:
            state.reports.clear()
        for number, key, report in [each for of_rank in everything for each in of_rank]:
            rows.owners[number][0].reports[key] = report
