"""The spec of a loaded pipeline: limits and defaults, as its signature and its components give them."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from collections.abc import Mapping
from typing import Any

from diffusers import DiffusionPipeline

from omni_grpc.adapter.abilities import Ability
from omni_grpc.adapter.guiders import own_scale, prompt_scale
from omni_grpc.adapter.loading import shift_name
from omni_grpc.adapter.parameters import Signature, strength
from omni_grpc.adapter.quirks import AS_LONG_AS_SOURCE, SEVERAL_IMAGES, SEVERAL_VIDEOS
from omni_grpc.types.diffusers_spec import SESSION
from omni_grpc.types.media import Modality, VideoInput
from omni_grpc.types.spec import Checkpoint

MAX_SIZE, MAX_PIXELS, MAX_FRAMES, MAX_IMAGES = 8192, 4096 * 4096, 10_001, 10
"""Sanity bounds: no pipeline states its own limits."""

RATES: Mapping[str, float] = {"Wan": 16.0, "CogVideoX": 8.0, "AnimateDiff": 8.0, "Mochi": 30.0, "Hunyuan": 15.0}
"""Frames per second that families were trained at, for pipelines without such a parameter; by the start of the class
name.
"""
USUAL_RATE = 24.0


def describe(
    pipeline: DiffusionPipeline,
    ability: Ability,
    signature: Signature,
    checkpoint: Checkpoint,
    call_kwargs: Mapping[str, Any],
) -> Checkpoint:
    """The checkpoint with what only the loaded pipeline knows. `call_kwargs` are defaults like the signature's own."""
    takes = ability.takes | ({"sigmas"} if _takes_sigmas(pipeline, signature) else set())
    takes |= {"shift"} if shift_name(pipeline) else set()
    spec = dataclasses.replace(checkpoint.spec, tasks=ability.tasks, guidance=ability.guidance, takes=takes)
    session = {
        "limits": _limits(pipeline, signature, ability.modality),
        "defaults": _defaults(pipeline, signature, ability.modality, call_kwargs),
    }
    return dataclasses.replace(checkpoint, spec=spec, configs={**checkpoint.configs, SESSION: session})


def sample_rate(pipeline: DiffusionPipeline) -> int:
    """The sample rate in Hz of the sound that a pipeline makes; 0 if none of its components states one."""
    for component in ("vocoder", "vae", "audio_vae"):
        part = getattr(pipeline, component, None)
        for holder in (getattr(part, "config", None), part):
            for name in ("output_sampling_rate", "sampling_rate", "sample_rate"):
                value = getattr(holder, name, None)
                if isinstance(value, numbers.Integral):
                    return int(value)
    return 0


def fps(pipeline: DiffusionPipeline, signature: Signature) -> float:
    """The frames per second of a pipeline's videos where a request does not set them."""
    if (own := signature.default("fps")) is not None:
        return float(own)
    return next((rate for start, rate in RATES.items() if signature.pipeline.startswith(start)), USUAL_RATE)


def frames_used(pipeline: DiffusionPipeline, source: VideoInput, made: int) -> int:
    """How many frames of a source video are used for a video of `made` frames."""
    used = min(source.num_frames, made)
    # these drop what makes no whole latent frame
    stride = _frame_stride(pipeline) if type(pipeline).__name__ in SEVERAL_VIDEOS else 1
    return (used - 1) // stride * stride + 1


def _takes_sigmas(pipeline: DiffusionPipeline, signature: Signature) -> bool:
    """Whether a call can give the noise levels of flow matching: pipelines hand them to their scheduler, unless that
    makes its own under `use_flow_sigmas`.
    """
    scheduler = getattr(pipeline, "scheduler", None)
    if "sigmas" not in signature.parameters or scheduler is None or "FlowMatch" not in type(scheduler).__name__:
        return False
    takes = inspect.signature(scheduler.set_timesteps).parameters
    return "sigmas" in takes and not scheduler.config.get("use_flow_sigmas")


def _limits(pipeline: DiffusionPipeline, signature: Signature, modality: Modality) -> dict[str, Any]:
    multiple = _size_multiple(pipeline) if modality is not Modality.AUDIO else 1
    limits: dict[str, Any] = {
        "size_multiple": multiple,
        "min_size": multiple,
        "max_size": MAX_SIZE // multiple * multiple,
        "max_pixels": MAX_PIXELS,
        "max_prompt_tokens": _max_prompt_tokens(pipeline, signature),
    }
    if "images" in signature and modality is Modality.IMAGE:
        limits["max_input_images"] = MAX_IMAGES if signature.pipeline in SEVERAL_IMAGES else 1
    if "num_frames" in signature:
        limits["max_frames"] = MAX_FRAMES
        stride, usual = _frame_stride(pipeline), signature.default("num_frames")
        # a rule that the pipeline's own default breaks is not its rule
        if stride > 1 and isinstance(usual, int) and usual % stride == 1:
            limits |= {"frame_multiple": stride, "frame_offset": 1}
    if signature.name("duration") == "audio_end_in_s" and (longest := _longest(pipeline)):
        limits["max_duration"] = longest
    return limits


def _defaults(
    pipeline: DiffusionPipeline, signature: Signature, modality: Modality, call_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    def default(field: str) -> Any:
        return call_kwargs.get(signature.name(field) or "", signature.default(field))

    scale = default("scale") if signature.name("scale") else own_scale(pipeline)
    guidance = {"scale": scale, "rescale": default("rescale") or 0.0}
    if (true_cfg_scale := default("true_cfg_scale")) is not None:
        guidance["true_cfg_scale"] = float(true_cfg_scale)
    width, height = (0, 0) if modality is Modality.AUDIO else _size(pipeline)
    made = {
        "width": default("width") or width,
        "height": default("height") or height,
        "steps": default("steps") or 50,
        "guidance": guidance,
        "prompt_scale": prompt_scale(pipeline),
        "num_frames": default("num_frames"),
        "fps": (default("fps") or fps(pipeline, signature)) if modality is Modality.VIDEO else None,
        "duration": default("duration"),
        "sample_rate_hz": None,
        "strength": strength(signature, default("strength")),
        "layers": default("layers"),
        # a pipeline with a scale of its own for a second prediction is guided once there is one
        "negative_prompt": call_kwargs.get("negative_prompt") if "true_cfg_scale" in signature else None,
        "frames_of_source": signature.pipeline in AS_LONG_AS_SOURCE or None,
    }
    return {name: value for name, value in made.items() if value is not None}


def _size_multiple(pipeline: DiffusionPipeline) -> int:
    """Pixels for each latent pixel. Some pipelines want more and say so when they are called; some round down."""
    for name in ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor"):
        value = getattr(pipeline, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1


def _frame_stride(pipeline: DiffusionPipeline) -> int:
    for name in ("vae_scale_factor_temporal", "vae_temporal_compression_ratio"):
        value = getattr(pipeline, name, None)
        if isinstance(value, int):
            return value
    return 1


def _size(pipeline: DiffusionPipeline) -> tuple[int, int]:
    """What pipelines compute for themselves where they are given no size."""
    multiple = _size_multiple(pipeline)
    samples = [getattr(pipeline, "default_sample_size", None)]
    for name in ("unet", "transformer"):
        samples.append(getattr(getattr(getattr(pipeline, name, None), "config", None), "sample_size", None))
    for sample in samples:
        if isinstance(sample, int) and multiple > 1:
            return sample * multiple, sample * multiple
        if isinstance(sample, list | tuple) and len(sample) == 2 and multiple > 1:
            return sample[1] * multiple, sample[0] * multiple
    return 1024, 1024


def _max_prompt_tokens(pipeline: DiffusionPipeline, signature: Signature) -> int:
    parameter = signature.parameters.get("max_sequence_length")
    if parameter is not None and isinstance(parameter.default, int):
        return parameter.default
    most = getattr(getattr(pipeline, "tokenizer", None), "model_max_length", None)
    return most if isinstance(most, int) and most < 1_000_000 else 512


def _longest(pipeline: DiffusionPipeline) -> float:
    """Seconds that a latent diffusion model of sound makes: its latents have one length."""
    config = getattr(getattr(pipeline, "transformer", None), "config", None)
    length, hop, rate = (
        getattr(config, "sample_size", None), getattr(pipeline.vae, "hop_length", None), sample_rate(pipeline)
    )  # fmt: skip
    return float(length * hop / rate) if length and hop and rate else 0.0
