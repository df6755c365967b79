"""Compares the native Qwen-Image with diffusers on one checkpoint and prints a Markdown table of the differences.

    python -m tools.parity_table [CHECKPOINT]

Without a checkpoint, a tiny one is built. Both run in float32 on the CPU, from the same seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from torch import Tensor

from omni_grpc.models.qwen_image.pipeline_text_to_image import QwenImagePipeline
from omni_grpc.nn.rows import LayoutCache
from omni_grpc.pipeline.base import Done, Pipeline
from omni_grpc.pipeline.batch import assemble, step
from omni_grpc.pipeline.images import Image
from omni_grpc.pipeline.state import State
from omni_grpc.registry import open_checkpoint
from omni_grpc.request import Guidance, GuidanceNorm, ImageFormat, Request, Task
from tools.tiny_checkpoints import build_qwen_image

SHORT = "a red cat"
LONG = "mountains and a lake at sunrise, watercolor painting, soft pastel colors, studio light, high detail, " * 4
NEGATIVE = "low quality, blurry"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request to compare. Guidance is on where there is a negative prompt."""

    width: int = 64
    height: int = 64
    prompt: str = SHORT
    negative_prompt: str | None = None
    steps: int = 2
    seeds: tuple[int, ...] = (7,)

    def request(self, id: str = "parity") -> Request:
        guided = self.negative_prompt is not None
        return Request(
            id=id,
            model="parity",
            task=Task.TEXT_TO_IMAGE,
            prompt=self.prompt,
            negative_prompt=self.negative_prompt,
            width=self.width,
            height=self.height,
            steps=self.steps,
            guidance=Guidance(true_cfg_scale=4.0 if guided else 1.0, norm=GuidanceNorm.RENORM),
            seeds=self.seeds,
            num_outputs=len(self.seeds),
            output_format=ImageFormat.PNG,
        )

    def __str__(self) -> str:
        cfg = "cfg" if self.negative_prompt is not None else "plain"
        return f"{self.width}x{self.height}-{len(self.prompt)}chars-{cfg}-{len(self.seeds)}images-{self.steps}steps"


CASES = (
    Case(),
    Case(negative_prompt=NEGATIVE),
    Case(width=96, prompt=LONG, negative_prompt=NEGATIVE, steps=4),
    Case(width=96, seeds=(1, 2)),
    Case(width=128, height=96, negative_prompt=LONG, seeds=(1, 2, 3)),
    Case(width=128, height=96, prompt=LONG, steps=4),
    Case(width=16, height=48, negative_prompt="", seeds=(5, 9), steps=4),
    Case(width=48, height=16, prompt=LONG),
    Case(steps=1, seeds=(1, 2)),
    Case(width=96, height=96, negative_prompt=NEGATIVE, steps=1),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What one implementation made of a case: latents [images, T, C], the images, and the tokens of the prompt."""

    latents: Tensor
    images: Sequence[Image]
    prompt_tokens: int = 0

    def differs_from(self, other: Result) -> tuple[float, int]:
        """The largest difference of the latents and of the 8-bit images."""
        pixels = (
            int(np.abs(mine.astype(int) - theirs.astype(int)).max())
            for mine, theirs in zip(self.images, other.images, strict=True)
        )
        return (self.latents - other.latents).abs().max().item(), max(pixels)


def run_native(pipeline: Pipeline, requests: Sequence[Request]) -> list[Result]:
    """Runs the requests together, each until it is done, as the worker does."""
    with torch.inference_mode():
        states = [pipeline.prepare(request) for request in requests]
        running: list[State] = [state for group in states for state in group]
        layouts, rows = LayoutCache("cpu"), None
        while running:
            rows = assemble(running, layouts, rows)
            running = [state for state, outcome in step(pipeline, rows) if not isinstance(outcome, Done)]
        return [
            Result(
                torch.stack([state.latents for state in group]),
                [image for state in group for image in pipeline.decode(state)],
                group[0].prompt_tokens,
            )
            for group in states
        ]


def run_diffusers(pipeline: Any, request: Request) -> Result:
    """The oracle. One step is run without shift_terminal, which diffusers turns into NaN there."""
    kept: dict[str, Tensor] = {}
    terminal = {"shift_terminal": None} if request.steps == 1 else {}
    scheduler = pipeline.scheduler
    pipeline.scheduler = type(scheduler).from_config(scheduler.config, **terminal)
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


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[QwenImagePipeline, Any]:
    """Both implementations on one checkpoint, on the CPU."""
    native = QwenImagePipeline.load(open_checkpoint(folder), torch.device("cpu"), dtype)
    oracle = diffusers.QwenImagePipeline.from_pretrained(folder, dtype=dtype, local_files_only=True)
    oracle.set_progress_bar_config(disable=True)
    return native, oracle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", metavar="CHECKPOINT")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        native, oracle = load(args.checkpoint or build_qwen_image(Path(scratch) / "tiny-qwen-image"))
    print("| size | prompt tokens | CFG | images | steps | latents, max abs diff | pixels, max diff of 255 |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        request = case.request()
        result = run_native(native, [request])[0]
        latents, pixels = result.differs_from(run_diffusers(oracle, request))
        cells = (
            f"{case.width}x{case.height}",
            result.prompt_tokens,
            "off" if request.negative_prompt is None else f"{request.guidance.true_cfg_scale:g}",
            len(case.seeds),
            case.steps,
            f"{latents:.1e}",
            pixels,
        )
        print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    main()
