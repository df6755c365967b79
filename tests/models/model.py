"""One spec under test on one checkpoint: our pipeline and diffusers', asked alike."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from torch import Tensor

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.pipeline.outputs import Pixels
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.settings import facts_of
from omni_grpc.types.media import ImageFormat, Modality, OutputFormat, VideoFormat
from omni_grpc.types.request import Draft, GuidanceDraft, Request, Task
from omni_grpc.types.spec import Checkpoint, GuidanceKind
from omni_grpc.worker.build import build
from omni_grpc.worker.device_memory import DeviceMemory
from omni_grpc.worker.packed import PackedRunner, RunningRequest

NAME = "tiny"
"""What drafts call the model."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What one implementation made of a request: latents [outputs, T, C], the pixels of each output, and the tokens of
    the prompt. Where outputs have segments, their latents lie one after the other.
    """

    latents: Tensor
    images: Sequence[Pixels]
    prompt_tokens: int = 0

    def differs_from(self, other: Result) -> tuple[float, int]:
        """The largest difference of the latents and of the 8-bit images."""
        pixels = (
            int(np.abs(mine.astype(int) - theirs.astype(int)).max())
            for mine, theirs in zip(self.images, other.images, strict=True)
        )
        return (self.latents - other.latents).abs().max().item(), max(pixels)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the suite has to know of a model.

    build: makes a tiny checkpoint in an empty folder.
    oracle: runs the diffusers pipeline of that checkpoint, and packs its final latents as ours are packed.
    drafts: what both are asked. The first is small and not guided by a second prediction; the suite varies it.
    shrink: makes small what the pipeline does at one fixed size; the first draft must do without it.
    """

    build: Callable[[Path], Path]
    oracle: Callable[[Any, Request], Result]
    drafts: tuple[Draft, ...]
    shrink: Callable[[Any], None] = lambda pipeline: None


class Model:
    """A checkpoint that is loaded as the worker loads it, and what its entry says to ask of it. `settings` are more
    settings of the server.
    """

    def __init__(
        self,
        entry: Entry,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int | None = 1,
        checkpoint: Checkpoint | None = None,
        memory: DeviceMemory | None = None,
        **settings: Any,
    ) -> None:
        self.entry = entry
        self.checkpoint = checkpoint or open_checkpoint(folder, name=NAME)
        self.spec = self.checkpoint.spec
        settings = {"warm_up_seconds": 0, **settings}
        config = EngineConfig.from_settings(
            model=str(folder), device=device, dtype=dtype, cpu_threads=threads, **settings
        )
        self.dtype: torch.dtype = getattr(torch, dtype)
        runner, self.residency, self.ready = build(
            config, self.checkpoint, "omni-test-", lambda loading: None, memory=memory
        )
        self.facts = facts_of(config, self.checkpoint, self.ready)
        assert isinstance(runner, PackedRunner)
        self.pipeline, self.device, self.staging = runner._pipeline, torch.device(device), runner._staging
        self.components: Mapping[str, Any] = self.residency.components
        entry.shrink(self.pipeline)

    @functools.cached_property
    def diffusers(self) -> Any:
        """The pipeline that model_index.json names, in diffusers."""
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            self.checkpoint.path, dtype=self.dtype, local_files_only=True
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @property
    def lossless(self) -> OutputFormat:
        """A format whose files are the same where the pixels are; of videos there is none that loses nothing."""
        is_video = self.entry.drafts[0].task.modality is Modality.VIDEO
        return VideoFormat.MP4 if is_video else ImageFormat.RAW_RGB8

    def draft(self, *, wider: int = 0, higher: int = 0, longer: int = 0, **changes: Any) -> Draft:
        """The first draft of the entry, so many multiples of its size wider and higher and, if it is a video, longer,
        otherwise changed as said.
        """
        draft, limits = self.entry.drafts[0], self.checkpoint.limits
        size = {
            "width": (draft.width or 0) + wider * limits.size_multiple,
            "height": (draft.height or 0) + higher * limits.size_multiple,
            "num_frames": draft.num_frames and draft.num_frames + longer * limits.frame_multiple,
        }
        return dataclasses.replace(draft, **(size | changes))

    def guided(self, scale: float = 4.0, **changes: Any) -> Draft:
        """A draft that is guided in the way this model can be: by a second prediction, by a trained scale, or not."""
        if GuidanceKind.TRUE_CFG in self.checkpoint.guidance:
            return self.draft(**({"negative_prompt": "", "guidance": GuidanceDraft(true_cfg_scale=scale)} | changes))
        if GuidanceKind.EMBEDDED in self.checkpoint.guidance:
            return self.draft(**({"guidance": GuidanceDraft(scale=scale)} | changes))
        return self.draft(**changes)

    def request(self, draft: Draft, id: str = "job") -> Request:
        """The draft, checked and completed as the server does it."""
        return resolve_request(draft, self.facts, id=id).request

    def runner(self) -> PackedRunner:
        return PackedRunner(
            self.pipeline,
            self.device,
            "omni-test-",
            latent_rgb=self.checkpoint.latent_rgb,
            staging=self.staging,
        )

    def run(self, *drafts: Draft) -> list[Result]:
        """Ours, all together from the first step to the last of each."""
        return self.run_requests(*(self.request(draft, f"job_{number}") for number, draft in enumerate(drafts)))

    def run_requests(self, *requests: Request) -> list[Result]:
        runner = self.runner()
        for request in requests:
            runner.prepare(request)
        running = tuple(request.id for request in requests)
        while running:
            report = runner.step(running)
            assert report.broken == ()
            ended = {progress.id for progress in report.progress if progress.finished}
            running = tuple(request_id for request_id in running if request_id not in ended)
        return [self.result(runner, request) for request in requests]

    def oracle(self, draft: Draft) -> Result:
        """The same request in diffusers."""
        return self.entry.oracle(self.diffusers, self.request(draft))

    @torch.inference_mode()
    def result(self, runner: PackedRunner, request: Request) -> Result:
        """What a runner made of a request whose last step is done."""
        held, pixels = runner._held[request.id], []
        for state, finished in zip(held.states, held.finished, strict=True):
            decoded = [self.pipeline.decode(state, part) for part in (*finished, state.latents)]
            pixels += [self.pipeline.join(outputs).pixels for outputs in zip(*decoded, strict=True)]
        return Result(latents(held), pixels, held.states[0].prompt_tokens)


def latents(held: RunningRequest) -> Tensor:
    """What was made so far of a request of which nothing is decoded yet: [outputs, T, C], segment after segment."""
    return torch.stack(
        [torch.cat([*finished, state.latents]) for state, finished in zip(held.states, held.finished, strict=True)]
    )


def shape(asked: Draft | Request) -> tuple[int | None, ...]:
    """Of the pixels of one output."""
    frames = (asked.num_frames,) if asked.task.modality is Modality.VIDEO else ()
    return (*frames, asked.height, asked.width, 3)


def label(draft: Draft) -> str:
    """A draft in a few words."""
    guidance = "plain" if draft.negative_prompt is None else "cfg"
    frames = "" if draft.num_frames is None else f"x{draft.num_frames}"
    size = f"{draft.width}x{draft.height}{frames}-{len(draft.prompt)}chars"
    task = "" if draft.task is Task.TEXT_TO_IMAGE else f"{draft.task.lower()}-"
    return f"{task}{size}-{guidance}-{len(draft.seeds)}images-{draft.steps}steps"
