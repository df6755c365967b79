"""Helios under test: videos of one, two and three chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import PIL.Image
import torch

from omni_grpc.models.helios import CHUNK, PATCH
from omni_grpc.pipeline.patches import Grid
from omni_grpc.types.media import ImageInput, Inputs, VideoInput
from omni_grpc.types.request import Draft, GuidanceDraft, Request, Task
from tests.models.cases.ask import LONG, NEGATIVE, OFF, SHORT
from tests.models.model import NAME, Entry, Result
from tools.tiny.helios import build_helios

GUIDED: Mapping[str, Any] = {"negative_prompt": NEGATIVE, "guidance": GuidanceDraft(true_cfg_scale=3.0)}


def ask(
    width: int = 32,
    height: int = 32,
    *,
    prompt: str = SHORT,
    steps: int = 2,
    seeds: tuple[int, ...] = (7,),
    num_frames: int = 33,
    task: Task = Task.TEXT_TO_VIDEO,
    **more: Any,
) -> Draft:
    return Draft(
        model=NAME,
        task=task,
        prompt=prompt,
        width=width,
        height=height,
        steps=steps,
        seeds=seeds,
        num_frames=num_frames,
        **more,
    )


def still(width: int, height: int) -> ImageInput:
    return ImageInput(width, height, 3, moving(width, height, 1).data)


def moving(width: int, height: int, frames: int) -> VideoInput:
    """Stripes that wander."""
    t, y, x = np.indices((frames, height, width))
    pixels = np.stack([5 * x + 3 * t, 4 * y + 20 + 2 * t, 2 * (x + y)], -1) % 256
    return VideoInput(width, height, frames, 24.0, pixels.astype(np.uint8).tobytes())


def picture(image: ImageInput) -> PIL.Image.Image:
    return PIL.Image.frombytes("RGB", (image.width, image.height), image.data)


def pictures(video: VideoInput) -> list[PIL.Image.Image]:
    size = len(video.data) // video.num_frames
    return [
        PIL.Image.frombytes("RGB", (video.width, video.height), video.data[start : start + size])
        for start in range(0, len(video.data), size)
    ]


def helios(pipeline: Any, request: Request) -> Result:
    """Several outputs are several prompts, since the pipeline draws one noise for all videos of a prompt. The latents
    are taken from the VAE's door, chunk by chunk, with its scaling undone.
    """
    inputs, generators = request.inputs, [torch.Generator().manual_seed(seed) for seed in request.seeds]
    given: dict[str, Any] = {}
    if inputs.first_frame is not None:
        given["image"] = picture(inputs.first_frame)
    if inputs.source_video is not None:
        given["video"] = pictures(inputs.source_video)
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
        # noise for given frames comes from one generator, not from one for each output
        generator=generators[0] if given else generators,
        **given,
    ).frames
    del pipeline.vae.decode
    height, width = (size // PATCH for size in chunks[0].shape[-2:])
    grid = Grid(frames=CHUNK, height=height, width=width, patch=PATCH)
    latents = [torch.cat([grid.pack(chunk[output]) for chunk in chunks]) for output in range(request.num_outputs)]
    return Result(torch.stack(latents), list((frames * 255).round().astype("uint8")))


ENTRIES: Mapping[str, Entry] = {
    "HeliosPipeline": Entry(
        build=build_helios,
        oracle=helios,
        drafts=(
            ask(guidance=OFF),
            ask(num_frames=66, seeds=(1, 2)),
            ask(48, num_frames=99, negative_prompt=NEGATIVE, prompt=LONG, steps=3),
            ask(16, 48, num_frames=66, negative_prompt="", seeds=(3, 1), steps=1),
            # the fourth chunk is the first one that does not see all before it
            ask(48, 16, num_frames=132),
            ask(48, num_frames=66, task=Task.IMAGE_TO_VIDEO, inputs=Inputs(first_frame=still(50, 37)), **GUIDED),
            ask(num_frames=66, task=Task.VIDEO_TO_VIDEO, inputs=Inputs(source_video=moving(32, 32, 70))),
            ask(16, task=Task.VIDEO_TO_VIDEO, inputs=Inputs(source_video=moving(34, 40, 110)), **GUIDED),
        ),
    )
}
