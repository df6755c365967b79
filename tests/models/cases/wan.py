"""Wan: two experts from text and from frames, and TI2V."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers import WanImageToVideoPipeline
from torch import Tensor

from omni_grpc.pipeline.patches import Grid
from omni_grpc.types.media import ImageInput, Inputs
from omni_grpc.types.request import Draft, GuidanceDraft, Request, Task
from tests.models.cases.ask import LONG, NEGATIVE, OFF, SHORT
from tests.models.model import NAME, Entry, Result
from tools.tiny_checkpoints import build_wan_i2v, build_wan_t2v, build_wan_ti2v

ODD = "  a cat &amp; a bird\n \N{LEFT DOUBLE QUOTATION MARK}quick\N{RIGHT DOUBLE QUOTATION MARK} "
"""A prompt that is cleaned before it is read."""


def ask(
    width: int = 64,
    height: int = 64,
    frames: int = 5,
    *,
    prompt: str = SHORT,
    steps: int = 2,
    seeds: tuple[int, ...] = (7,),
    task: Task = Task.TEXT_TO_VIDEO,
    **more: Any,
) -> Draft:
    return Draft(
        model=NAME, task=task, prompt=prompt, width=width, height=height, num_frames=frames, steps=steps, seeds=seeds,
        **more,
    )  # fmt: skip


def guided(scale: float = 4.0, low_noise: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "negative_prompt": NEGATIVE,
        "guidance": GuidanceDraft(true_cfg_scale=scale, scale_low_noise=low_noise, **more),
    }


def shown(seed: int = 0, *, last: bool = False, channels: int = 3) -> dict[str, Any]:
    """Frames to go by: noise on a gradient, in a size that no VAE takes."""
    names = ("first_frame", "last_frame") if last else ("first_frame",)
    frames = {}
    for name in names:
        noise = np.random.default_rng(seed + len(frames)).integers(0, 128, (37, 50, channels))
        pixels = (noise + np.linspace(0, 127, 50)[None, :, None]).astype(np.uint8)
        frames[name] = ImageInput(50, 37, channels, pixels.tobytes())
    return {"task": Task.IMAGE_TO_VIDEO, "inputs": Inputs(**frames)}


def wan(pipeline: Any, request: Request) -> Result:
    """Its latents are videos, which are packed here; of a first frame that stays what it is, nothing is denoised."""
    kept: dict[str, Tensor] = {}
    guidance, more = request.guidance, {}
    fixed = pipeline.config.expand_timesteps and request.inputs.first_frame is not None
    if fixed and not isinstance(pipeline, WanImageToVideoPipeline):
        pipeline = WanImageToVideoPipeline(**pipeline.components, expand_timesteps=True)
        pipeline.set_progress_bar_config(disable=True)
    if guidance.boundary_ratio is not None:
        pipeline.register_to_config(boundary_ratio=guidance.boundary_ratio)
        more["guidance_scale_2"] = guidance.scale_low_noise
    for field, name in (("first_frame", "image"), ("last_frame", "last_image")):
        if (image := getattr(request.inputs, field)) is not None:
            more[name] = PIL.Image.frombytes("RGB", (image.width, image.height), image.data)
    frames = pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        guidance_scale=guidance.true_cfg_scale,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        num_inference_steps=request.steps,
        num_videos_per_prompt=request.num_outputs,
        generator=[torch.Generator().manual_seed(seed) for seed in request.seeds],
        callback_on_step_end=lambda pipe, index, timestep, values: kept.update(values) or values,
        output_type="np",
        **more,
    ).frames
    videos = kept["latents"][:, :, 1 if fixed else 0 :]
    grid = Grid(frames=videos.shape[2], height=videos.shape[3] // 2, width=videos.shape[4] // 2, patch=2)
    latents = torch.stack([grid.pack(video) for video in videos])
    return Result(latents, [(255 * video).round().astype(np.uint8) for video in frames])


ENTRIES: Mapping[str, Entry] = {
    "WanPipeline": Entry(
        build=build_wan_t2v,
        oracle=wan,
        drafts=(
            ask(32, 48, guidance=OFF),
            ask(48, 80, 9, prompt=LONG, steps=4, **guided(5.0, 2.0)),
            ask(96, 64, 1, seeds=(1, 2)),
            ask(32, 32, 13, prompt=ODD, steps=5, seeds=(3, 4), **guided(3.0, boundary_ratio=0.5)),
            ask(16, 48, steps=3, guidance=GuidanceDraft(boundary_ratio=1.0)),
            ask(64, 32, steps=1, **guided()),
        ),
    ),
    "WanImageToVideoPipeline": Entry(
        build=build_wan_i2v,
        oracle=wan,
        drafts=(
            ask(32, 48, guidance=OFF, **shown()),
            ask(80, 48, 9, steps=4, **shown(1, last=True), **guided(3.5, 2.5)),
            ask(48, 64, 5, prompt=LONG, seeds=(1, 2), **shown(2, last=True)),
            ask(32, 32, 13, steps=3, seeds=(5, 6), **shown(3), **guided()),
        ),
    ),
    "WanPipeline-ti2v": Entry(
        build=build_wan_ti2v,
        oracle=wan,
        drafts=(
            ask(guidance=OFF),
            ask(96, 64, 9, steps=4, prompt=LONG, **guided(5.0)),
            ask(**shown()),
            ask(64, 96, 13, steps=3, seeds=(1, 2), **shown(1), **guided(5.0)),
            ask(32, 64, 1, seeds=(3, 4)),
        ),
    ),
}
