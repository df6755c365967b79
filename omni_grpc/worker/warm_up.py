"""Warm-up before the first request: runs the denoiser at a few sizes, fits the cost model to the times, and on a GPU
measures which kernels are fastest for those sizes.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from omni_grpc.nn.mesh import Mesh
from omni_grpc.nn.rows import LayoutCache
from omni_grpc.ops.tuning import choices
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.pipeline.batch import assemble
from omni_grpc.pipeline.state import State
from omni_grpc.resolve.request import placeholder
from omni_grpc.types.plan import CostModel
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Checkpoint
from omni_grpc.worker.fitting import nonnegative

logger = logging.getLogger(__name__)

Fits = Callable[[Request], bool]
"""Whether a request is predicted to fit in memory."""
Sample = tuple[tuple[int, ...], float]
"""Tokens of each row of a step, and the milliseconds it took."""


@torch.inference_mode()
def warm_up(
    pipeline: Pipeline,
    checkpoint: Checkpoint,
    device: torch.device,
    seconds: float,
    ranks: Mesh | None = None,
    fits: Fits = lambda request: True,
) -> CostModel:
    """Measures steps of growing size until `seconds` are spent, and fits the cost model. With 0 nothing is measured. On
    a GPU it takes up to half as long again to choose kernels, unless an earlier start has chosen them. Sizes that do
    not fit in memory are left out. `ranks` run the same steps as rank 0, whose clock and memory decide, and choose
    kernels by its times.
    """
    agreed = bool if ranks is None else functools.partial(ranks.first_says, device=device)
    if device.type != "cuda" or not seconds:
        return fit_steps(pipeline, checkpoint, device, seconds, agreed, fits)
    kept = choices(device)
    if ranks is not None:
        kept.adopt(ranks.first_gives(kept.own))
    with kept.recorded() as wanted:
        cost = fit_steps(pipeline, checkpoint, device, seconds, agreed, fits)
        step_of_usual_size(pipeline, checkpoint, device, cost, seconds / 2, agreed, fits)
    # what the last steps ask for counts most: they are the largest, and the very last is the usual one
    done = kept.tune(dict(reversed(wanted.items())), device, seconds / 2)
    if ranks is not None:
        kept.adopt(ranks.first_gives(kept.own))
    logger.debug("warm-up: %d of %d shapes measured for the choice of kernels", done, len(wanted))
    return cost


def fit_steps(
    pipeline: Pipeline,
    checkpoint: Checkpoint,
    device: torch.device,
    seconds: float,
    agreed: Callable[[bool], bool] = bool,
    fits: Fits = lambda request: True,
) -> CostModel:
    until = time.monotonic() + seconds
    samples: list[Sample] = []
    for size, frames, outputs in sizes(checkpoint):
        if agreed(time.monotonic() >= until):
            break
        request = placeholder(checkpoint, size=size, frames=frames, outputs=outputs)
        if agreed(fits(request)):
            samples.append(_measure(pipeline, request, device))
    cost = fit(samples)
    logger.debug("warm-up: %d sizes, %s", len(samples), cost)
    return cost


def step_of_usual_size(
    pipeline: Pipeline,
    checkpoint: Checkpoint,
    device: torch.device,
    cost: CostModel,
    seconds: float,
    agreed: Callable[[bool], bool] = bool,
    fits: Fits = lambda request: True,
) -> None:
    """One step of a request with all defaults, unless it is predicted to take longer than `seconds`, or not to fit."""
    usual = checkpoint.defaults
    request = placeholder(checkpoint, size=min(usual.width, usual.height), frames=usual.num_frames or 0, outputs=1)
    if not agreed(fits(request)):
        return
    states = pipeline.prepare(request)
    if agreed(cost.step_ms(tokens(states)) <= 1000 * seconds):
        pipeline.predict_all(assemble(states, LayoutCache(device, capacity=1)))


def fit(samples: Sequence[Sample]) -> CostModel:
    """Non-negative least squares for fixed, token and pair, weighted so that relative errors count alike."""
    if not samples:
        return CostModel()
    features = [(1.0, sum(rows), sum(n * n for n in rows)) for rows, _ in samples]
    times = [milliseconds for _, milliseconds in samples]
    fixed, token, pair = nonnegative(features, times, weights=[1 / time for time in times])
    return CostModel(fixed=fixed, token=token, pair=pair)


def sizes(checkpoint: Checkpoint) -> Iterator[tuple[int, int, int]]:
    """Edge (pixels), frames and outputs to measure. Edges double from the smallest to the default one, each with one
    output and, for the first half, also with two. Then the frames of videos double, from the fewest that any request
    may have.
    """
    limits, usual = checkpoint.limits, checkpoint.defaults
    largest, frames = min(usual.width, usual.height), limits.frame_offset + limits.frame_multiple
    size = limits.min_size
    while size <= largest:
        yield size, frames, 1
        if 2 * size <= largest:
            yield size, frames, 2
        size *= 2
    while (frames := 2 * frames) <= (usual.num_frames or 0):
        yield size // 2, frames, 1


def _measure(pipeline: Pipeline, request: Request, device: torch.device) -> Sample:
    states = pipeline.prepare(request)
    rows = assemble(states, LayoutCache(device, capacity=1))
    times = []
    # the first run pays for what is made at first use (autotuning, workspaces), and of three one for a graph
    for _ in range(4 if device.type == "cuda" else 3):
        began = time.monotonic()
        pipeline.predict_all(rows)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1000 * (time.monotonic() - began))
    return tokens(states), min(times)


def tokens(states: Sequence[State]) -> tuple[int, ...]:
    """The tokens of each row of a step."""
    return tuple(sum(cond.row.lengths) for state in states for cond in state.cond.values())
