"""What a generation really was, from its request, what came out, and what is known of the model and the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.lora import Adapter, AppliedLora, Lora
from omni_grpc.types.plan import VisitedLevels
from omni_grpc.types.request import Request
from omni_grpc.types.results import Effective


class Measures(Protocol):
    """The figures of one output: pixels, frames, frames per second, Hz, seconds; 0 for what it has not."""

    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def num_frames(self) -> int: ...
    @property
    def fps(self) -> float: ...
    @property
    def sample_rate_hz(self) -> int: ...
    @property
    def duration(self) -> float: ...


def effective(
    request: Request,
    first: Measures | None,
    *,
    steps: int,
    evals: int,
    scheduler: str,
    found: WorkerFindings,
    defaults_used: Mapping[str, str],
    dropped_tokens: Mapping[str, int],
    levels: VisitedLevels,
) -> Effective:
    """`first` is the first output; `steps` those of each part, `evals` the denoiser forwards; `scheduler` the
    checkpoint's own; `found` what the worker found out about the model; `levels` the noise levels of each part.
    """
    return Effective(
        # what came out is the truth about its size and length, whatever was asked for
        width=first.width if first else request.width,
        height=first.height if first else request.height,
        steps=steps,
        evals=evals,
        seeds=request.seeds,
        guidance=request.guidance,
        scheduler=request.scheduler or scheduler,
        output_format=request.output_format,
        strength=request.strength,
        layers=request.layers or 0,
        num_frames=first.num_frames if first else 0,
        fps=request.fps or 0.0,
        output_fps=first.fps if first else 0.0,
        duration=first.duration if first else 0.0,
        sample_rate_hz=first.sample_rate_hz if first else 0,
        cache=request.cache or found.fixed_cache,
        loras=_applied(request.loras, found.loras),
        shift=levels.shift,
        sigmas=levels.sigmas,
        preset=request.preset,
        defaults_used=defaults_used,
        dropped_tokens=dropped_tokens,
        **found.execution(),
    )


def _applied(loras: Sequence[Lora], adapters: Sequence[Adapter]) -> tuple[AppliedLora, ...]:
    """The adapters of a request as they were applied: one entry per adapter and component that it changes."""
    found = {adapter.key: adapter for adapter in adapters}
    return tuple(
        AppliedLora(
            lora_id=lora.lora_id,
            scale=lora.scale,
            target=component,
            keys_applied=found[lora.key].applied[component],
            keys_skipped=len(found[lora.key].skipped),
        )
        for lora in loras
        if lora.key in found
        for component in found[lora.key].targets
        if lora.target in ("", component)
    )
