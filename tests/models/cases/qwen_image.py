"""Qwen-Image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni_grpc.types.request import Request
from tests.models.cases.ask import LONG, NEGATIVE, ask
from tests.models.model import Entry, Result
from tools.tiny_checkpoints import build_qwen_image


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


ENTRIES: Mapping[str, Entry] = {
    "QwenImagePipeline": Entry(
        build=build_qwen_image,
        oracle=qwen_image,
        drafts=(
            ask(),
            ask(96, prompt=LONG, negative_prompt=NEGATIVE, steps=4),
            ask(128, 96, negative_prompt=LONG, seeds=(1, 2, 3)),
            ask(16, 48, negative_prompt="", seeds=(5, 9), steps=4),
            ask(48, 16, prompt=LONG),
            ask(steps=1, seeds=(1, 2)),
            ask(96, 96, negative_prompt=NEGATIVE, steps=1),
        ),
    ),
}
