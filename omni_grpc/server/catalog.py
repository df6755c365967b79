"""What the API says of the model: tasks, defaults, limits, refusals, state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from omni_grpc import wire
from omni_grpc.config import NATIVE_CACHES, QUANTIZATIONS
from omni_grpc.gate import EngineState, ModelView
from omni_grpc.resolve.frames import nearest_frames
from omni_grpc.resolve.presets import obstacle, shift_fault, sigmas_fault
from omni_grpc.resolve.rules import TAKEN
from omni_grpc.server.requests import NAMES
from omni_grpc.server.served import EDIT_IMAGE, GENERATE_AUDIO, GENERATE_IMAGE, GENERATE_VIDEO, unserved_paths
from omni_grpc.types.diffusers_spec import OPAQUE_FAMILY
from omni_grpc.types.lora import MAX_LORA_SCALE, MAX_LORAS
from omni_grpc.types.media import AudioFormat, ImageFormat, Modality, VideoFormat
from omni_grpc.types.preset import Preset
from omni_grpc.types.request import Task
from omni_grpc.types.spec import Checkpoint, GuidanceKind
from omni_grpc.v1 import generation_pb2, model_pb2, options_pb2, sampling_pb2

SCALES = (0.0, 100.0)
"""What `resolve.RULES` allows for both guidance scales."""
LORA_SCALES = model_pb2.DoubleRange(min=-MAX_LORA_SCALE, max=MAX_LORA_SCALE)
RATES = (1.0, 240.0)
"""What `resolve.RULES` allows for frames per second."""

STATES: Mapping[EngineState, model_pb2.ModelState] = {
    EngineState.STARTING: model_pb2.MODEL_STATE_LOADING,
    EngineState.READY: model_pb2.MODEL_STATE_READY,
    EngineState.RESTARTING: model_pb2.MODEL_STATE_LOADING,
    EngineState.ASLEEP: model_pb2.MODEL_STATE_SLEEPING,
    # it takes no more jobs, and is about to leave memory
    EngineState.DRAINING: model_pb2.MODEL_STATE_AVAILABLE,
    EngineState.STOPPED: model_pb2.MODEL_STATE_AVAILABLE,
    EngineState.FAILED: model_pb2.MODEL_STATE_FAILED,
}


MESSAGES: Mapping[Modality, tuple[Any, Set[str]]] = {
    Modality.VIDEO: (generation_pb2.GenerateVideoRequest, GENERATE_VIDEO),
    Modality.AUDIO: (generation_pb2.GenerateAudioRequest, GENERATE_AUDIO),
}
"""The request message for tasks that do not make images, and its fields that are served."""


def model_message(view: ModelView) -> model_pb2.Model:
    """A model's current record. What only loading can tell is left out until then."""
    checkpoint, ready, state = view.checkpoint, view.ready, view.state
    makes = {task.modality for task in checkpoint.tasks}
    return wire.build(
        model_pb2.Model,
        name=checkpoint.name,
        state=STATES[state],
        tasks=checkpoint.tasks,
        defaults=_defaults(view) if checkpoint.described else None,
        schedulers=checkpoint.schedulers,
        guidance_kinds=_guidance(checkpoint),
        refusals=[model_pb2.Refusal(feature=path, reason=why) for path, why in _refusals(view).items()],
        limits=_limits(view) if checkpoint.described else None,
        dtype=ready.dtype if ready else "",
        family=checkpoint.spec.family,
        pipeline=checkpoint.spec.name,
        cache_methods=NATIVE_CACHES if view.facts.cache else (),
        quantizations=QUANTIZATIONS if checkpoint.spec.family != OPAQUE_FAMILY else (),
        loras=sorted(adapter.id for adapter in view.facts.found.loras),
        preview_methods=[options_pb2.PREVIEW_METHOD_NONE, options_pb2.PREVIEW_METHOD_LATENT_RGB],
        image_formats=ImageFormat if Modality.IMAGE in makes else (),
        video_formats=VideoFormat if Modality.VIDEO in makes else (),
        audio_formats=AudioFormat if Modality.AUDIO in makes else (),
        error=view.failure,
        weight_bytes=ready.weight_bytes if ready else 0,
        quantized_layers=ready.found.quantized_layers if ready else {},
        kept_layers=ready.found.kept_layers if ready else 0,
        residency=ready.found.residency if ready else "",
        presets=[_preset(preset, view) for preset in checkpoint.presets],
    )


def _preset(preset: Preset, view: ModelView) -> model_pb2.Preset:
    checkpoint = view.checkpoint
    return wire.build(
        model_pb2.Preset,
        name=preset.name,
        title=preset.title,
        sampling=_sampling(preset),
        scheduler_config={name: json.dumps(value) for name, value in preset.scheduler_config.items()},
        source=preset.source,
        is_default=preset.name == checkpoint.recipe,
        # before it is loaded, nobody knows its adapters
        unusable=obstacle(preset, checkpoint, view.facts.found.loras) if view.ready else "",
    )


def _sampling(preset: Preset) -> sampling_pb2.SamplingParams:
    """What a preset sets."""
    guidance = {field.name: getattr(preset.guidance, field.name) for field in dataclasses.fields(preset.guidance)}
    return wire.build(
        sampling_pb2.SamplingParams,
        steps=preset.steps,
        guidance=wire.build(sampling_pb2.Guidance, **guidance)
        if any(v is not None for v in guidance.values())
        else None,
        scheduler=preset.scheduler,
        shift=preset.shift,
        sigmas=preset.sigmas,
        loras=[one.lora for one in preset.loras],
    )


def _defaults(view: ModelView) -> sampling_pb2.SamplingParams:
    """Those of the model, under the settings of its recipe if it has one."""
    defaults, facts = view.checkpoint.defaults, view.facts
    made = wire.build(
        sampling_pb2.SamplingParams,
        steps=defaults.steps,
        guidance=defaults.guidance,
        num_outputs=1,
        cache=facts.found.fixed_cache if facts.cache is None else facts.cache.complete(None, defaults.steps),
    )
    for preset in view.checkpoint.presets:
        if preset.name == view.checkpoint.recipe:
            made.MergeFrom(_sampling(preset))
            made.preset = preset.name
    return made


def _refusals(view: ModelView) -> dict[str, str]:
    """What cannot be asked, by field, in the requests for the tasks that the model has."""
    checkpoint = view.checkpoint
    spec = checkpoint.spec
    result: dict[str, str] = {}
    for message, served in dict.fromkeys(_messages(checkpoint.tasks)):
        for path in unserved_paths(message.DESCRIPTOR, served):
            result.setdefault(path, "not yet served")
        for name in message.DESCRIPTOR.fields_by_name:
            if name in served and NAMES.get(name, name) in TAKEN and not _takes(checkpoint, NAMES.get(name, name)):
                result.setdefault(name, f"not supported by {spec.name}")
    result |= {f"task {task}": why for task, why in checkpoint.refusals.items()}
    if not checkpoint.described:
        return result
    facts = view.facts
    if not checkpoint.presets:
        result["sampling.preset"] = f"there is no preset for {spec.name}; --presets FILE names others"
    if why := sigmas_fault(checkpoint.scheduler, checkpoint):
        result["sampling.sigmas"] = why
    if why := shift_fault(checkpoint.scheduler, checkpoint):
        result["sampling.shift"] = why
    if not facts.found.loras:
        result["sampling.loras"] = "no LoRA adapter is loaded; the server loads them with --lora NAME=PATH"
    if facts.cache is None:
        result["sampling.cache"] = "the step cache is off; native models turn it on with --cache-backend"
    if facts.found.fixed_cache is not None:
        result["sampling.cache.off"] = f"{facts.found.fixed_cache.name} is on for every request"
    if spec.exclusive:
        result["step_batching"] = f"{spec.name} runs one request at a time; others wait in the queue"
    return result


def _limits(view: ModelView) -> model_pb2.ModelLimits:
    checkpoint, limits = view.checkpoint, view.limits
    kinds, scales = _guidance(checkpoint), model_pb2.DoubleRange(min=SCALES[0], max=SCALES[1])
    return wire.build(
        model_pb2.ModelLimits,
        min_width=checkpoint.limits.min_size,
        min_height=checkpoint.limits.min_size,
        max_width=checkpoint.limits.max_size,
        max_height=checkpoint.limits.max_size,
        max_pixels=view.facts.max_pixels,
        size_multiple=checkpoint.limits.size_multiple,
        default_width=checkpoint.defaults.width,
        default_height=checkpoint.defaults.height,
        max_steps=limits.max_steps,
        max_outputs=limits.max_outputs,
        max_prompt_chars=limits.max_prompt_chars,
        max_prompt_tokens=checkpoint.limits.max_prompt_tokens,
        max_input_images=max(part.limits.max_input_images for part in checkpoint.parts),
        max_loras=MAX_LORAS if view.facts.found.loras else 0,
        lora_scale=LORA_SCALES if view.facts.found.loras else None,
        strength=model_pb2.DoubleRange(min=0, max=1) if _takes(checkpoint, "strength") else None,
        max_audio=_max_audio(checkpoint),
        **_video_limits(checkpoint),
        guidance_scale=scales if GuidanceKind.EMBEDDED in kinds else None,
        true_cfg_scale=scales if GuidanceKind.TRUE_CFG in kinds else None,
    )


def _messages(tasks: Sequence[Task]) -> Iterator[tuple[Any, Set[str]]]:
    """The request messages for these tasks, and the fields of each that are served."""
    for task in tasks:
        if task is Task.TEXT_TO_IMAGE:
            yield generation_pb2.GenerateImageRequest, GENERATE_IMAGE
        else:
            yield MESSAGES.get(task.modality, (generation_pb2.EditImageRequest, EDIT_IMAGE))


def _guidance(checkpoint: Checkpoint) -> tuple[GuidanceKind, ...]:
    return tuple(dict.fromkeys(kind for part in checkpoint.parts for kind in part.guidance))


def _takes(checkpoint: Checkpoint, name: str) -> bool:
    taken = {field for part in checkpoint.parts for field in part.spec.takes}
    # a video's playing time is a number of frames to the model
    return name in taken or (name == "duration" and "num_frames" in taken)


def _max_audio(checkpoint: Checkpoint) -> float | None:
    makes_sound = any(task in (Task.TEXT_TO_AUDIO, Task.TEXT_TO_AUDIO_VIDEO) for task in checkpoint.tasks)
    longest = checkpoint.limits.max_duration
    return longest if makes_sound and longest else None


def _video_limits(checkpoint: Checkpoint) -> dict[str, Any]:
    """Limits of videos; nothing for a model that makes none."""
    if all(task.modality is not Modality.VIDEO for task in checkpoint.tasks):
        return {}
    limits, defaults = checkpoint.limits, checkpoint.defaults
    return {
        "min_frames": nearest_frames(1, limits),
        "max_frames": limits.max_frames,
        "frame_multiple": limits.frame_multiple,
        "frame_offset": limits.frame_offset,
        "default_frames": defaults.num_frames or 0,
        "default_fps": defaults.fps or 0.0,
        "fps": model_pb2.DoubleRange(min=RATES[0], max=RATES[1]) if _takes(checkpoint, "fps") else None,
    }
