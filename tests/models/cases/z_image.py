"""Z-Image under test."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni_grpc.pipeline.patches import Grid
from omni_grpc.types.request import GuidanceDraft, Request
from tests.models.cases.ask import LONG, NEGATIVE, OFF, ask
from tests.models.model import Entry, Result
from tools.tiny_checkpoints import build_z_image


def z_image(pipeline: Any, request: Request, **more: Any) -> Result:
    """Its latents are pictures, which are packed here. It guides wherever its scale is above 0; `more` are arguments
    of diffusers that a request has no field for.
    """
    kept: dict[str, Tensor] = {}
    guided = request.negative_prompt is not None
    images = pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        guidance_scale=request.guidance.true_cfg_scale if guided else 0.0,
        width=request.width,
        height=request.height,
        num_inference_steps=request.steps,
        num_images_per_prompt=request.num_outputs,
        generator=[torch.Generator().manual_seed(seed) for seed in request.seeds],
        callback_on_step_end=lambda pipe, index, timestep, values: kept.update(values) or values,
        **more,
    ).images
    height, width = (side // 2 for side in kept["latents"].shape[2:])
    grid = Grid(height=height, width=width, patch=2, channels_last=True)
    latents = torch.stack([grid.pack(picture[:, None]) for picture in kept["latents"]])
    return Result(latents, [np.asarray(image) for image in images])


def scale(value: float) -> GuidanceDraft:
    return GuidanceDraft(true_cfg_scale=value)


ENTRY = Entry(
    build=build_z_image,
    oracle=z_image,
    # tokens of the image: 16, 32, 24, 48, 3, 18, 64; only 32 and 64 are not filled up
    drafts=(
        ask(guidance=OFF),
        ask(128, prompt=LONG, negative_prompt="", guidance=scale(1.5), steps=4),
        ask(96, seeds=(1, 2)),
        ask(128, 96, prompt=LONG, negative_prompt=NEGATIVE, guidance=scale(3.0), seeds=(1, 2, 3)),
        ask(16, 48, negative_prompt=LONG, guidance=scale(5.0), seeds=(5, 9), steps=4),
        ask(48, 96, prompt=LONG, steps=8),
        ask(128, 128, negative_prompt=NEGATIVE, guidance=scale(2.0), steps=1),
    ),
)

ENTRIES = {"ZImagePipeline": ENTRY}
