"""From states to one packed batch, and from its predictions back to states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import MOD, LayoutCache, Row, Rows
from omni_grpc.ops.step import Move, Norm, guide_step
from omni_grpc.pipeline.base import Finished, Outcome, Pipeline, SegmentFinished
from omni_grpc.pipeline.guidance import combine
from omni_grpc.pipeline.state import COND, UNCOND, PrecomputedStep, State

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
    """One forward for all rows: state -> branch -> prediction [T, C]. No state moves; what the predictions make of
    those whose schedule is Euler's is computed in one go, and waits in them.
    """
    predictions: dict[State, dict[str, Tensor]] = {}
    packed = pipeline.predict(rows)
    stream = rows.stream(rows.bound[LATENTS][0])
    for (state, branch), prediction in zip(rows.owners, stream.split(packed), strict=True):
        predictions.setdefault(state, {})[branch] = prediction[: len(state.latents)]
    _precompute_steps(pipeline, rows, packed)
    return predictions


def advance(pipeline: Pipeline, state: State, predictions: Mapping[str, Tensor]) -> Outcome:
    """Guides one state and moves it on, given the predictions of its branches. What features keep of a segment is gone
    with its end.
    """
    ahead = state.ahead
    if ahead is not None and ahead.evaluation == state.evaluation:
        outcome = pipeline.advance(state, ahead.prediction)
    else:
        outcome = pipeline.advance(state, combine(predictions, pipeline.guidance(state)))
    if isinstance(outcome, SegmentFinished | Finished):
        state.slots.clear()
    return outcome


def _precompute_steps(pipeline: Pipeline, rows: Rows, packed: Tensor) -> None:
    """Guides the states of a batch and takes their steps, as far as these are Euler's, given the prediction [T, C]."""
    latents, offsets = rows[LATENTS], rows.stream(rows.bound[LATENTS][0]).offsets
    places: dict[State, dict[str, int]] = {}
    for (state, branch), offset in zip(rows.owners, offsets, strict=False):
        places.setdefault(state, {})[branch] = offset
    moves: dict[State, Move] = {}
    for state, place in places.items():
        state.ahead = None
        width, guidance = state.schedule.width(state.evaluation), pipeline.guidance(state)
        if width is not None and latents.shape == packed.shape:
            moves[state] = Move(
                cond=place[COND],
                uncond=place.get(UNCOND),
                latents=place[COND],
                tokens=len(state.latents),
                width=width,
                scale=guidance.true_cfg_scale,
                rescale=guidance.rescale,
                norm=Norm[guidance.norm.name],
            )
    if moves:
        moved = guide_step(packed, latents, list(moves.values()))
        for state, prediction, following, odd in zip(
            moves, moved.guided, moved.latents, moved.odd.unbind(), strict=True
        ):
            state.ahead = PrecomputedStep(
                evaluation=state.evaluation, prediction=prediction, latents=following, odd=odd
            )


def _tokens(state: State) -> Tensor:
    return state.latents if state.context is None else torch.cat([state.latents, state.context])


def single_row(state: State, branch: str, row: Row) -> AbstractContextManager[Rows]:
    """Makes one sequence the active batch for the length of the block: for what is computed ahead of the steps."""
    return activate(Rows([(state, branch)], [row], LayoutCache(state.latents.device, capacity=1)))
