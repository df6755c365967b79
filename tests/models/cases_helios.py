"""Helios under test: videos of one, two and three chunks."""

from __future__ import annotations

from typing import Any

import torch

from omni_grpc.models.helios import CHUNK, PATCH
from omni_grpc.pipeline.patches import Grid
from omni_grpc.request import Draft, Request, Task
from tests.models.model import NAME, Entry, Result
from tools.tiny.helios import build_helios

SHORT = "a red cat"
LONG = "mountains and a lake at sunrise, watercolor painting, soft pastel colors, studio light, high detail, " * 4
NEGATIVE = "low quality, blurry"


def ask(
    width: int = 32,
    height: int = 32,
    *,
    prompt: str = SHORT,
    steps: int = 2,
    seeds: tuple[int, ...] = (7,),
    num_frames: int = 33,
    **more: Any,
) -> Draft:
    return Draft(
        model=NAME,
        task=Task.TEXT_TO_VIDEO,
        prompt=prompt,
        width=width,
        height=height,
        steps=steps,
        seeds=seeds,
        num_frames=num_frames,
        **more,
    )


def helios(pipeline: Any, request: Request) -> Result:
    """Several outputs are several prompts, since the pipeline draws one noise for all videos of a prompt. The latents
    are taken from the VAE's door, chunk by chunk, with its scaling undone.
    """
    chunks: list[torch.Tensor] = []
    config, decode = pipeline.vae.config, pipeline.vae.decode
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
    pipeline.vae.decode = lambda latents, **more: chunks.append((latents - mean) / std) or decode(latents, **more)
    frames = pipeline(
        prompt=[request.prompt] * request.num_outputs,
        negative_prompt=request.negative_prompt,
        guidance_scale=1.0 if request.negative_prompt is None else request.guidance.true_cfg_scale,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        num_inference_steps=request.steps,
        generator=[torch.Generator().manual_seed(seed) for seed in request.seeds],
    ).frames
    del pipeline.vae.decode
    height, width = (size // PATCH for size in chunks[0].shape[-2:])
    grid = Grid(frames=CHUNK, height=height, width=width, patch=PATCH)
    latents = [torch.cat([grid.pack(chunk[output]) for chunk in chunks]) for output in range(request.num_outputs)]
    return Result(torch.stack(latents), list((frames * 255).round().astype("uint8")))


ENTRY = Entry(
    build=build_helios,
    oracle=helios,
    drafts=(
        ask(),
        ask(negative_prompt=NEGATIVE),
        ask(num_frames=66, seeds=(1, 2)),
        ask(48, 64, num_frames=99, negative_prompt=NEGATIVE, prompt=LONG, steps=3),
        ask(48, num_frames=66, negative_prompt=LONG, seeds=(5, 9)),
        ask(80, 48, num_frames=99, steps=4),
        ask(16, 48, num_frames=99, negative_prompt="", seeds=(3, 1), steps=1),
        ask(64, 16, num_frames=132, steps=2),
    ),
)
