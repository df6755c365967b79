"""Packs states into one batch for the denoiser, and gives its predictions back to the states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import MOD, LayoutCache, Row, Rows
from omni_grpc.ops.step import GuidanceNormCode, OutputStep, guide_step
from omni_grpc.pipeline.base import Finished, Outcome, Pipeline, SegmentFinished
from omni_grpc.pipeline.guidance import combine
from omni_grpc.pipeline.state import COND, UNCOND, PrecomputedStep, State

LATENTS = "latents"


def assemble(states: Sequence[State], layouts: LayoutCache, previous: Rows | None = None) -> Rows:
    """Packs one row per branch of every state, with what the denoiser reads in their next evaluation.

    Bound to the rows are "latents" (followed by the context tokens), each constant of the branches' conds, and the
    current evaluation's slice of each of their tables. `previous`: the batch of the step before, whose packed constants
    are used again if the rows are the same.
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
    """One forward for all rows: state -> branch -> prediction [T, C]. No state moves. Euler steps are computed for all
    states at once, and stored in `State.ahead` until `advance` takes them.
    """
    predictions: dict[State, dict[str, Tensor]] = {}
    packed = pipeline.predict_all(rows)
    stream = rows.stream(rows.bound[LATENTS][0])
    for (state, branch), prediction in zip(rows.owners, stream.split(packed), strict=True):
        predictions.setdefault(state, {})[branch] = prediction[: len(state.latents)]
    _precompute_steps(pipeline, rows, packed)
    return predictions


def advance(pipeline: Pipeline, state: State, predictions: Mapping[str, Tensor]) -> Outcome:
    """Applies guidance to the predictions of one state, branch -> [T, C], and moves the state on. At the end of a
    segment, what features keep in `State.slots` is dropped.
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
    """Guidance and the next step of all states whose schedule takes Euler steps, in one kernel. packed: [T, C]."""
    latents, offsets = rows[LATENTS], rows.stream(rows.bound[LATENTS][0]).offsets
    places: dict[State, dict[str, int]] = {}
    for (state, branch), offset in zip(rows.owners, offsets, strict=False):
        places.setdefault(state, {})[branch] = offset
    moves: dict[State, OutputStep] = {}
    for state, place in places.items():
        state.ahead = None
        width, guidance = state.schedule.width(state.evaluation), pipeline.guidance(state)
        if width is not None and latents.shape == packed.shape:
            moves[state] = OutputStep(
                cond=place[COND],
                uncond=place.get(UNCOND),
                latents=place[COND],
                tokens=len(state.latents),
                width=width,
                scale=guidance.true_cfg_scale,
                rescale=guidance.rescale,
                norm=GuidanceNormCode[guidance.norm.name],
            )
    if moves:
        moved = guide_step(packed, latents, list(moves.values()))
        for state, prediction, following, nonfinite in zip(
            moves, moved.guided, moved.latents, moved.nonfinite.unbind(), strict=True
        ):
            state.ahead = PrecomputedStep(
                evaluation=state.evaluation, prediction=prediction, latents=following, nonfinite=nonfinite
            )


def _tokens(state: State) -> Tensor:
    return state.latents if state.context is None else torch.cat([state.latents, state.context])


def single_row(state: State, branch: str, row: Row) -> AbstractContextManager[Rows]:
    """Context manager that makes one row the active batch, for what is computed once before the steps."""
    return activate(Rows([(state, branch)], [row], LayoutCache(state.latents.device, capacity=1)))
