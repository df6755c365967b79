"""What a model says about its limits, held against a request before it is sent: the server's own rules in short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omni_grpc.types.request import MAX_SEED
from omni_grpc.types.request_options import AUDIO, EDIT, IMAGE, VIDEO
from omni_grpc.v1.model_pb2 import Model
from omni_grpc.v1.sampling_pb2 import Task

_ENDS: Mapping[str, tuple[str, ...]] = {
    IMAGE: ("TEXT_TO_IMAGE",),
    EDIT: ("IMAGE_TO_IMAGE", "IMAGE_EDIT", "INPAINT", "LAYERED"),
    VIDEO: ("_VIDEO", "VIDEO_EDIT"),
    AUDIO: ("TEXT_TO_AUDIO",),
}
"""Kind -> how the names of its tasks end."""
_COUNTS: Mapping[str, str] = {"steps": "max_steps", "num_outputs": "max_outputs", "num_frames": "max_frames"}
_RANGES = ("fps", "strength", "guidance_scale", "true_cfg_scale")


def faults(model: Model, kind: str, prompt: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields of one request that are outside of what the model takes, each with the rule. What it leaves open, the
    server decides.
    """
    if not model.HasField("limits"):
        return  # a model that is still on its way has not said what it takes
    tasks = [Task.Name(task).removeprefix("TASK_") for task in model.tasks]
    if not any(task.endswith(_ENDS[kind]) for task in tasks):
        yield "kind", f"{kind} is not what {model.name} does; it does {', '.join(tasks)}"
        return
    limits = model.limits
    if not prompt.strip() and kind != EDIT and "prompt_embeds" not in options.get("extra", {}):
        yield "prompt", "is empty; describe what to generate"
    for name, text in (("prompt", prompt), ("negative_prompt", options.get("negative_prompt", ""))):
        if limits.max_prompt_chars and len(text) > limits.max_prompt_chars:
            yield name, f"has {len(text)} characters; the maximum is {limits.max_prompt_chars}"
    yield from _sizes(model, options)
    for name, most in ((name, getattr(limits, field)) for name, field in _COUNTS.items()):
        if name in options and most and not 1 <= options[name] <= most:
            yield name, f"{options[name]} is outside 1..{most}"
    for name in _RANGES:
        if name in options and limits.HasField(name):
            low, high = getattr(limits, name).min, getattr(limits, name).max
            if not low <= options[name] <= high:
                yield name, f"{options[name]:g} is outside {low:g}..{high:g}"
    for name, seeds in (("seed", [options.get("seed", 0)]), ("seeds", options.get("seeds", ()))):
        if any(seed > MAX_SEED for seed in seeds):
            yield name, f"{max(seeds)} is outside 0..{MAX_SEED}"
    scheduler = options.get("scheduler")
    if scheduler and scheduler not in model.schedulers:
        has = ", ".join(model.schedulers) or "none to choose from; leave it out"
        yield "scheduler", f"{model.name} has no {scheduler!r}; it has {has}"
    if len(options.get("images", ())) > limits.max_input_images > 0:
        yield "images", f"has {len(options['images'])} images; {model.name} takes at most {limits.max_input_images}"


def _sizes(model: Model, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    limits = model.limits
    for name, low, high in (
        ("width", limits.min_width, limits.max_width),
        ("height", limits.min_height, limits.max_height),
    ):
        value, multiple = options.get(name), limits.size_multiple
        if value is None or not multiple:
            continue
        nearest = min(max(round(value / multiple) * multiple, low), high)
        if not low <= value <= high:
            yield name, f"{value} is outside {low}..{high}; nearest valid value: {nearest}"
        elif value % multiple:
            yield name, f"{value} is not a multiple of {multiple}; nearest valid value: {nearest}"
    width, height = options.get("width", limits.default_width), options.get("height", limits.default_height)
    if {"width", "height"} & options.keys() and 0 < limits.max_pixels < width * height:
        yield "width, height", f"{width} x {height} is more than {limits.max_pixels} pixels"
