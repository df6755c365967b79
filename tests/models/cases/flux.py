"""FLUX.1: dev, schnell and Kontext."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import PIL.Image
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from torch import Tensor

from omni_grpc.types.media import ImageInput, Inputs
from omni_grpc.types.request import GuidanceDraft, Request, Task
from tests.models.cases.ask import LONG, NEGATIVE, ask
from tests.models.model import Entry, Result
from tools.tiny_checkpoints import build_flux, build_flux_kontext, build_flux_schnell

HEADS = 2
"""Every row has 512 tokens of text: half the heads are half the time."""
SIZES = ((48, 96), (64, 64), (80, 48), (96, 32))
"""Of pictures to go by, in place of those of the real model: its sizes are a million pixels each."""


def guided(scale: float | None = None, cfg: float = 2.0) -> dict[str, Any]:
    """Both kinds of guidance."""
    return {"negative_prompt": NEGATIVE, "guidance": GuidanceDraft(scale=scale, true_cfg_scale=cfg)}


def scaled(scale: float) -> dict[str, Any]:
    return {"guidance": GuidanceDraft(scale=scale)}


def shown(width: int, height: int, *, seed: int = 0) -> dict[str, Any]:
    """A picture to go by: noise on a gradient, in a size that no VAE takes."""
    noise = np.random.default_rng(seed).integers(0, 128, (height, width, 3))
    pixels = (noise + np.linspace(0, 127, width)[None, :, None]).astype(np.uint8)
    picture = ImageInput(width, height, 3, pixels.tobytes())
    return {"task": Task.IMAGE_EDIT, "inputs": Inputs(images=(picture,))}


def flux(pipeline: Any, request: Request, **more: Any) -> Result:
    """Latents are packed already. Schnell was trained on prompts of half the length."""
    kept: dict[str, Tensor] = {}
    embeds = pipeline.transformer.config.guidance_embeds
    images = pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        true_cfg_scale=request.guidance.true_cfg_scale,
        guidance_scale=request.guidance.scale if embeds else 0.0,
        max_sequence_length=512 if embeds else 256,
        width=request.width,
        height=request.height,
        num_inference_steps=request.steps,
        num_images_per_prompt=request.num_outputs,
        generator=[torch.Generator().manual_seed(seed) for seed in request.seeds],
        callback_on_step_end=lambda pipe, index, timestep, values: kept.update(values) or values,
        **more,
    ).images
    return Result(kept["latents"], [np.asarray(image) for image in images])


def kontext(pipeline: Any, request: Request) -> Result:
    """diffusers brings the size that is asked for to `max_area`, and the picture to one of its list."""
    more: dict[str, Any] = {"max_area": request.width * request.height}
    for picture in request.inputs.images:
        more["image"] = PIL.Image.frombytes("RGB", (picture.width, picture.height), picture.data)
    with mock.patch.object(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", SIZES):
        return flux(pipeline, request, **more)


def shrink(pipeline: Any) -> None:
    pipeline.sizes = SIZES


FIRST, CFG = ask(), ask(16, 48, seeds=(5, 9), **guided(cfg=3.0))
LONGER = ask(96, prompt=LONG, steps=3)

ENTRIES: Mapping[str, Entry] = {
    "FluxPipeline": Entry(
        build=partial(build_flux, heads=HEADS),
        oracle=flux,
        drafts=(
            FIRST,
            CFG,
            LONGER,
            ask(128, 96, steps=1, seeds=(1, 2, 3)),
            ask(80, 64, steps=4, **scaled(0.0)),
            ask(64, 80, steps=4, prompt=LONG, seeds=(1, 2), **guided(scale=7.5)),
        ),
    ),
    "FluxPipeline-schnell": Entry(
        build=partial(build_flux_schnell, heads=HEADS),
        oracle=flux,
        drafts=(FIRST, CFG, LONGER, ask(48, 16, steps=1, seeds=(1, 2))),
    ),
    "FluxKontextPipeline": Entry(
        build=partial(build_flux_kontext, heads=HEADS),
        oracle=kontext,
        drafts=(
            FIRST,
            CFG,
            ask(**shown(64, 64)),
            ask(96, 64, steps=3, prompt=LONG, **shown(131, 50), **scaled(2.5)),
            ask(64, 96, seeds=(3, 8), **shown(30, 101), **guided(scale=5.0)),
            ask(16, 48, steps=1, seeds=(4,), **shown(301, 70)),
        ),
        shrink=shrink,
    ),
}
