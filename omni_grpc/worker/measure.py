"""Measures at warm-up what requests take of the device: each phase, at growing sizes, as far as the time goes.

Step, prepare and decode are measured one after the other, with nothing beside them, from the bytes that torch's
allocator had given out at most. What is larger than all that was measured is extrapolated by the laws of MemoryModel.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omni_grpc.config import EngineConfig
from omni_grpc.nn.mesh import Mesh
from omni_grpc.nn.rows import LayoutCache, Rows
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.pipeline.batch import assemble
from omni_grpc.pipeline.state import State
from omni_grpc.resolve.request import placeholder
from omni_grpc.resolve.residency import GRAPHS
from omni_grpc.resolve.settings import facts_of
from omni_grpc.types.cache_fields import MOST_RESIDUALS
from omni_grpc.types.memory_model import MARGIN, HeldLaw, MemoryModel, PixelLaw, StepLaw
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Checkpoint, Limits
from omni_grpc.worker.failure import ran_out_of_memory
from omni_grpc.worker.fitting import upper
from omni_grpc.worker.memory import Meter, meter_of
from omni_grpc.worker.warm_up import sizes, tokens

logger = logging.getLogger(__name__)

SHARE = 0.4
"""Of the time of the warm-up. The rest is for the cost model."""
LEAST = 6
"""Sizes that are measured however long it takes: laws of three coefficients come from no fewer."""
STEPS = (1, 1, 9, 9)
"""Of the requests that are measured, in turns: some of what is computed ahead grows with them."""
PICTURES = ("images", "first_frame", "last_frame", "reference_images", "source_video")
WORDS = "a red circle left of a blue square "


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one request took, in bytes. `rows`: the tokens of each of its rows; `area`, `volume`: pixels of a frame and
    of all. `prepare` is beyond what it `held` afterwards; the other phases beyond what was held before.
    """

    rows: tuple[int, ...]
    area: int
    volume: int
    steps: int
    held: int
    prepare: int
    step: int
    decode: int


def memory_budget(config: EngineConfig) -> float:
    """Bytes that the operator gives to this model; infinite without such a setting."""
    budget = config.fleet.budget_bytes
    return float("inf") if budget is None else budget


def measured(
    pipeline: Pipeline,
    checkpoint: Checkpoint,
    device: torch.device,
    config: EngineConfig,
    meter: Meter | None = None,
    *,
    ranks: Mesh | None = None,
) -> tuple[MemoryModel, float]:
    """The model of a pipeline, without its capacity, and the seconds of the warm-up that are left. On a CPU, or without
    a warm-up, nothing is measured. `ranks`: as in `warm_up`.
    """
    began, seconds = time.monotonic(), config.worker.warm_up_seconds
    model = MemoryModel(
        tile_area=pipeline.tile_area,
        always_tiled=config.adapter.vae_use_tiling,
        segment_frames=checkpoint.limits.segment_frames,
    )
    meter = meter or meter_of(device)
    if meter is None or not seconds:
        return model, seconds
    until = began + SHARE * seconds
    agreed = bool if ranks is None else functools.partial(ranks.first_says, device=device)
    samples = _samples(
        pipeline, checkpoint, device, config, meter, lambda more: agreed(time.monotonic() + more > until)
    )
    model = fit_memory(samples, model)
    model = dataclasses.replace(model, encode=_encodes(pipeline, checkpoint, samples, meter))
    logger.debug("warm-up: memory of %d sizes, %s", len(samples), model)
    return model, max(seconds - (time.monotonic() - began), seconds / 2)


def with_capacity(
    model: MemoryModel, device: torch.device, config: EngineConfig, meter: Meter | None = None, *, coming: int = 0
) -> MemoryModel:
    """The model, with the bytes that there are for requests beside what is taken now, and `coming` that others may take
    later; unlimited where nothing was measured.
    """
    meter = meter or meter_of(device)
    if meter is None or model.step == StepLaw():
        return model
    graphs = 0 if config.worker.cuda_graph_tokens == 0 or config.offload is not None else GRAPHS
    available = min(memory_budget(config), meter.available())
    free = max(0.0, available - meter.allocated() - graphs - coming)
    capacity = (1 - MARGIN) * free
    logger.info("memory for requests: %.2f GiB, beside weights of %.2f", capacity / 2**30, meter.allocated() / 2**30)
    return dataclasses.replace(model, capacity=capacity)


def fit_memory(samples: Sequence[Sample], model: MemoryModel) -> MemoryModel:
    """The model with laws that predict no less than any sample took."""
    pixels = [(1.0, one.area, one.volume) for one in samples]
    step = upper([(1.0, sum(one.rows), max(one.rows)) for one in samples], [one.step for one in samples])
    held = upper([(len(one.rows), sum(one.rows), one.steps) for one in samples], [one.held for one in samples])
    row = upper(pixels, [max(one.rows) for one in samples])
    prepare = upper([(*of, one.steps) for of, one in zip(pixels, samples, strict=True)], [s.prepare for s in samples])
    return dataclasses.replace(
        model,
        row=PixelLaw(**_named(row)),
        step=StepLaw(fixed=step[0], token=step[1], longest=step[2]),
        held=HeldLaw(row=held[0], token=held[1], step=held[2]),
        prepare=PixelLaw(**_named(prepare)),
        prepare_step=prepare[3],
        decode=PixelLaw(**_named(upper(pixels, [one.decode for one in samples]))),
    )


def _named(coefficients: Sequence[float]) -> dict[str, float]:
    return dict(zip(("fixed", "area", "volume"), coefficients, strict=False))


@torch.inference_mode()
def _samples(
    pipeline: Pipeline,
    checkpoint: Checkpoint,
    device: torch.device,
    config: EngineConfig,
    meter: Meter,
    too_late: Callable[[float], bool],
) -> list[Sample]:
    """`too_late`: whether what takes so many seconds would end too late."""
    samples: list[Sample] = []
    last = 0.0
    for count, (size, frames, outputs) in enumerate(sizes(checkpoint)):
        began = time.monotonic()
        # the next size has up to four times the pixels
        if len(samples) >= LEAST and too_late(4 * last):
            break
        request = _longest(placeholder(checkpoint, size=size, frames=frames, outputs=outputs), checkpoint, config)
        request = dataclasses.replace(request, steps=STEPS[count % len(STEPS)])
        try:
            if not samples:
                # what is made at first use stays
                _sample(pipeline, request, device, meter, checkpoint.limits)
                began = time.monotonic()
            samples.append(_sample(pipeline, request, device, meter, checkpoint.limits))
        except RuntimeError as error:
            if not samples or not ran_out_of_memory(error):
                raise
            logger.warning("warm-up: %d x %d pixels do not fit in memory, so smaller sizes must do", size, size)
            break
        last = time.monotonic() - began
    return samples


def _longest(request: Request, checkpoint: Checkpoint, config: EngineConfig) -> Request:
    """The same with as long a prompt as there can be, and with what the step cache keeps of it, if there is one."""
    prompt = WORDS * (checkpoint.limits.max_prompt_tokens // 4 + 1)
    offer = facts_of(config, checkpoint, None).cache
    if offer is None:
        return dataclasses.replace(request, prompt=prompt)
    # one evaluation for each residual that is kept
    return dataclasses.replace(request, prompt=prompt, cache=offer.largest(), steps=MOST_RESIDUALS)


def _sample(pipeline: Pipeline, request: Request, device: torch.device, meter: Meter, limits: Limits) -> Sample:
    def step() -> Rows:
        for evaluation in range(request.steps):
            for state in states:
                state.evaluation = evaluation
            rows = assemble(states, LayoutCache(device, capacity=1))
            pipeline.predict_all(rows)
        return rows

    def decode() -> None:
        pipeline.decode(states[0], states[0].latents)

    before = meter.allocated()
    states, most = meter.peak(lambda: pipeline.prepare(request))
    prepared = meter.allocated()
    batch, stepping = meter.peak(step)
    holding = meter.allocated()
    _, decoding = meter.peak(decode)
    # the states and their batch are what is held
    del batch
    return _of(states, request, limits, holding - before, most - prepared, stepping - prepared, decoding - holding)


def _of(
    states: Sequence[State], request: Request, limits: Limits, held: int, prepare: int, step: int, decode: int
) -> Sample:
    frames = request.num_frames or 1
    if limits.segment_frames:
        frames = min(frames, limits.segment_frames)
    area = request.width * request.height
    return Sample(
        rows=tokens(states),
        area=area,
        volume=area * frames,
        steps=request.steps,
        held=max(0, held),
        prepare=max(0, prepare),
        step=max(0, step),
        decode=max(0, decode),
    )


@torch.inference_mode()
def _encodes(pipeline: Pipeline, checkpoint: Checkpoint, samples: Sequence[Sample], meter: Meter) -> PixelLaw:
    """What encoding a picture takes, where a model may be given some that the requests above did not have."""
    vae = getattr(pipeline, "vae", None)
    given = placeholder(checkpoint, size=checkpoint.limits.min_size, outputs=1).inputs.given
    if vae is None or given or not set(PICTURES) & checkpoint.spec.takes:
        return PixelLaw()
    features, values = [], []
    for area in sorted({one.area for one in samples}):
        edge = round(area**0.5)
        picture = torch.zeros(3, 1, edge, edge)
        values.append(max(0, _peak_of_encode(vae, picture, meter)))
        features.append((1.0, area))
    fixed, per_pixel = upper(features, values)
    return PixelLaw(fixed=fixed, area=per_pixel)


def _peak_of_encode(vae: torch.nn.Module, picture: Tensor, meter: Meter) -> int:
    before = meter.allocated()
    _, most = meter.peak(lambda: vae.encode(picture))  # type: ignore[operator]
    return most - before
