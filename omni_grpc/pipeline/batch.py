"""From states to one packed batch, and from its predictions back to states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import MOD, LayoutCache, Row, Rows
from omni_grpc.pipeline.base import Done, Outcome, Pipeline, Segment
from omni_grpc.pipeline.guidance import combine
from omni_grpc.pipeline.state import State

LATENTS = "latents"


def assemble(states: Sequence[State], layouts: LayoutCache, previous: Rows | None = None) -> Rows:
    """The rows of every branch of every state, state by state, with what the denoiser reads in their next evaluation.

    Bound are "latents" with the context tokens after them, each constant of the branches' conds, and one evaluation's
    slice of each of their tables. `previous` is the batch of the step before: where the rows are the same, its packed
    constants are used again.
    """
    owners = [(state, branch) for state in states for branch in state.branches]
    conds = [state.cond[branch] for state, branch in owners]
    rows = Rows(owners, [cond.row for cond in conds], layouts)
    rows.bind(LATENTS, states[0].stream, [_tokens(state) for state, _ in owners])
    rows.source = tuple(conds)
    kept = (
        previous is not None
        and previous.owners == rows.owners
        and all(before is now for before, now in zip(previous.source, conds, strict=True))
    )
    for name, (stream, _) in conds[0].constants.items():
        if kept and previous is not None:
            rows.bound[name] = previous.bound[name]
        else:
            rows.bind(name, stream, [cond.constants[name][1] for cond in conds])
    for name in conds[0].tables:
        slices = [cond.tables[name][state.evaluation] for cond, (state, _) in zip(conds, owners, strict=True)]
        rows.bind(name, MOD, slices)
    return rows


def predict(pipeline: Pipeline, rows: Rows) -> dict[State, dict[str, Tensor]]:
    """One forward for all rows: state -> branch -> prediction [T, C]. No state is changed."""
    predictions: dict[State, dict[str, Tensor]] = {}
    stream = rows.stream(rows.bound[LATENTS][0])
    for (state, branch), prediction in zip(rows.owners, stream.split(pipeline.predict(rows)), strict=True):
        predictions.setdefault(state, {})[branch] = prediction[: len(state.latents)]
    return predictions


def advance(pipeline: Pipeline, state: State, predictions: Mapping[str, Tensor]) -> Outcome:
    """Guides one state and moves it on, given the predictions of its branches. What features keep of a segment is gone
    with its end.
    """
    outcome = pipeline.advance(state, combine(predictions, pipeline.guidance(state)))
    if isinstance(outcome, Segment | Done):
        state.slots.clear()
    return outcome


def _tokens(state: State) -> Tensor:
    return state.latents if state.context is None else torch.cat([state.latents, state.context])


def alone(state: State, branch: str, row: Row) -> AbstractContextManager[Rows]:
    """Makes one sequence the active batch for the length of the block: for what is computed ahead of the steps."""
    return activate(Rows([(state, branch)], [row], LayoutCache(state.latents.device, capacity=1)))
