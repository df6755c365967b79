"""The models under test, by pipeline class; a class with several kinds of checkpoints has an entry for each, under
"Class-kind". Adding a model adds an entry here; docs/adding-a-model.md says what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni_grpc.request import Draft, Request
from tests.models import cases_helios, cases_wan
from tests.models.model import NAME, Entry, Result
from tools.tiny_checkpoints import build_qwen_image

SHORT = "a red cat"
LONG = "mountains and a lake at sunrise, watercolor painting, soft pastel colors, studio light, high detail, " * 4
NEGATIVE = "low quality, blurry"


def ask(
    width: int = 64,
    height: int = 64,
    *,
    prompt: str = SHORT,
    steps: int = 2,
    seeds: tuple[int, ...] = (7,),
    **more: Any,
) -> Draft:
    return Draft(model=NAME, prompt=prompt, width=width, height=height, steps=steps, seeds=seeds, **more)


def qwen_image(pipeline: Any, request: Request) -> Result:
    """One step is run without shift_terminal, which diffusers turns into NaN there. Its latents are packed already."""
    kept: dict[str, Tensor] = {}
    scheduler = pipeline.scheduler
    if request.steps == 1:
        pipeline.scheduler = type(scheduler).from_config(scheduler.config, shift_terminal=None)
    images = pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        true_cfg_scale=request.guidance.true_cfg_scale,
        width=request.width,
        height=request.height,
        num_inference_steps=request.steps,
        num_images_per_prompt=request.num_outputs,
        generator=[torch.Generator().manual_seed(seed) for seed in request.seeds],
        callback_on_step_end=lambda pipe, index, timestep, values: kept.update(values) or values,
    ).images
    pipeline.scheduler = scheduler
    return Result(kept["latents"], [np.asarray(image) for image in images])


def pipeline_of(name: str) -> str:
    """The pipeline class of an entry."""
    return name.partition("-")[0]


ENTRIES: Mapping[str, Entry] = {
    **cases_helios.ENTRIES,
    **cases_wan.ENTRIES,
    "QwenImagePipeline": Entry(
        build=build_qwen_image,
        oracle=qwen_image,
        drafts=(
            ask(),
            ask(negative_prompt=NEGATIVE),
            ask(96, prompt=LONG, negative_prompt=NEGATIVE, steps=4),
            ask(96, seeds=(1, 2)),
            ask(128, 96, negative_prompt=LONG, seeds=(1, 2, 3)),
            ask(128, 96, prompt=LONG, steps=4),
            ask(16, 48, negative_prompt="", seeds=(5, 9), steps=4),
            ask(48, 16, prompt=LONG),
            ask(steps=1, seeds=(1, 2)),
            ask(96, 96, negative_prompt=NEGATIVE, steps=1),
        ),
    ),
}
