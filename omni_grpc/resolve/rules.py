"""What is refused, in one table: a row is a field and a rule, which says what is wrong and the nearest valid value.

Rules look at a draft and at the facts; they run before any work. To refuse something else, add a row.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping

from omni_grpc.config import LimitsConfig
from omni_grpc.feature_rules.step_cache import CacheOffer
from omni_grpc.resolve.frames import counts_frames, duration_fault, nearest_frames
from omni_grpc.resolve.presets import preset_fault, shift_fault, shift_rule, sigmas_fault, sigmas_rule
from omni_grpc.types.cache_fields import FIELDS
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.load_progress import size_text
from omni_grpc.types.lora import MAX_LORA_SCALE, MAX_LORAS, Lora, copies, newest
from omni_grpc.types.media import AudioFormat, ImageFormat, Modality, OutputFormat, VideoFormat
from omni_grpc.types.parameters import has_place
from omni_grpc.types.request import MAX_SEED, Draft, Task
from omni_grpc.types.spec import Checkpoint

OUTPUT_FORMATS: Mapping[Modality, OutputFormat] = {
    Modality.IMAGE: ImageFormat.PNG,
    Modality.VIDEO: VideoFormat.MP4,
    Modality.AUDIO: AudioFormat.WAV,
}
TAKEN = (
    "strength", "layers", "num_frames", "fps", "duration", "start", "text", "images", "mask", "first_frame",
    "last_frame", "reference_images", "source_video", "control_video", "mask_video", "audio",
)  # fmt: skip
"""What ModelSpec.takes may name."""

MAX_LAYERS = 64
"""A sanity bound: no model states its own limit."""

REQUIRED: Mapping[str, tuple[Task, ...]] = {
    "images": (Task.IMAGE_TO_IMAGE, Task.IMAGE_EDIT, Task.INPAINT, Task.LAYERED),
    "mask": (Task.INPAINT,),
    "first_frame": (Task.IMAGE_TO_VIDEO,),
    "source_video": (Task.VIDEO_TO_VIDEO,),
    "audio": (Task.AUDIO_TO_VIDEO,),
}
"""The inputs without which a task has no meaning."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingFacts:
    """What rules may look at besides the request: the model, the server's limits, the step caches that requests can
    have (None: none), and what the worker found out. `lora_faults`: adapters that are known and cannot be used now, by
    id, each with the reason.
    """

    checkpoint: Checkpoint
    limits: LimitsConfig
    cache: CacheOffer | None = None
    found: WorkerFindings = dataclasses.field(default_factory=WorkerFindings)
    lora_faults: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def max_pixels(self) -> int:
        own = self.checkpoint.limits.max_pixels
        return own if self.limits.max_pixels is None else min(own, self.limits.max_pixels)


def takes(name: str, facts: ServingFacts) -> bool:
    """Whether the model has this part of guidance as a parameter of its own, and decides itself what it does."""
    return name in facts.checkpoint.spec.takes


def _size(axis: str) -> Callable[[Draft, ServingFacts], str]:
    def rule(draft: Draft, facts: ServingFacts) -> str:
        value, limits = getattr(draft, axis), facts.checkpoint.limits
        if value is None:
            return ""
        nearest = round(value / limits.size_multiple) * limits.size_multiple
        nearest = min(max(nearest, limits.min_size), limits.max_size)
        if not limits.min_size <= value <= limits.max_size:
            return f"{value} is outside {limits.min_size}..{limits.max_size}; nearest valid value: {nearest}"
        if value % limits.size_multiple:
            return f"{value} is not a multiple of {limits.size_multiple}; nearest valid value: {nearest}"
        return ""

    return rule


def _pixels(draft: Draft, facts: ServingFacts) -> str:
    defaults = facts.checkpoint.defaults
    width, height = draft.width or defaults.width, draft.height or defaults.height
    if width * height <= facts.max_pixels:
        return ""
    multiple = facts.checkpoint.limits.size_multiple
    shrink = math.sqrt(facts.max_pixels / (width * height))
    fit = tuple(max(multiple, int(side * shrink) // multiple * multiple) for side in (width, height))
    return f"{width} x {height} is more than {facts.max_pixels} pixels; the same shape fits as {fit[0]} x {fit[1]}"


def _count(name: str, most: Callable[[ServingFacts], int]) -> Callable[[Draft, ServingFacts], str]:
    def rule(draft: Draft, facts: ServingFacts) -> str:
        value = getattr(draft, name)
        if value is None or 1 <= value <= most(facts):
            return ""
        return f"{value} is outside 1..{most(facts)}; nearest valid value: {min(max(value, 1), most(facts))}"

    return rule


def _scale(name: str, low: float, high: float) -> Callable[[Draft, ServingFacts], str]:
    def rule(draft: Draft, facts: ServingFacts) -> str:
        value = getattr(draft.guidance, name)
        if value is None:
            return ""
        if not math.isfinite(value) or not low <= value <= high:
            nearest = f"; nearest valid value: {min(max(value, low), high):g}" if not math.isnan(value) else ""
            return f"{value} is outside {low:g}..{high:g}{nearest}"
        return ""

    return rule


def _interval(draft: Draft, facts: ServingFacts) -> str:
    start, end = draft.guidance.interval_start, draft.guidance.interval_end
    if (start if start is not None else 0.0) < (end if end is not None else 1.0):
        return ""
    return f"start {start or 0.0:g} must be less than end {1.0 if end is None else end:g}"


def _preview_rule(name: str, low: int, high: int) -> Callable[[Draft, ServingFacts], str]:
    def rule(draft: Draft, facts: ServingFacts) -> str:
        value = getattr(draft.preview, name, None)
        if value is None or low <= value <= high:
            return ""
        return f"{value} is outside {low}..{high}; nearest valid value: {min(max(value, low), high)}"

    return rule


def _seeds(draft: Draft, facts: ServingFacts) -> str:
    outputs = draft.num_outputs if draft.num_outputs is not None else max(1, len(draft.seeds))
    if len(draft.seeds) > 1 and len(draft.seeds) != outputs:
        return f"has {len(draft.seeds)} seeds for {outputs} outputs; give one seed, or one seed per output"
    last = outputs - 1 if len(draft.seeds) == 1 else 0
    for seed in draft.seeds:
        if not 0 <= seed <= MAX_SEED - last:
            return f"{seed} is outside 0..{MAX_SEED - last}; nearest valid value: {min(max(seed, 0), MAX_SEED - last)}"
    return ""


def _prompt(draft: Draft, facts: ServingFacts) -> str:
    # whoever takes a picture apart may leave it to the model to say what is in it
    embedded = draft.extra.get("prompt_embeds") is not None
    if not draft.prompt.strip() and draft.task is not Task.LAYERED and not embedded:
        return "is empty; describe what to generate"
    return _text("prompt")(draft, facts)


def _text(name: str) -> Callable[[Draft, ServingFacts], str]:
    def rule(draft: Draft, facts: ServingFacts) -> str:
        value = getattr(draft, name)
        most = facts.limits.max_prompt_chars
        if value is not None and len(value) > most:
            return f"has {len(value)} characters; the maximum is {most}"
        if value is not None and "\0" in value:
            return f"has a NUL character at position {value.index(chr(0))}; remove it"
        if value is not None and (half := re.search(r"[\ud800-\udfff]", value)):
            return f"has half of a surrogate pair at position {half.start()}; remove it"
        return ""

    return rule


def _taken(name: str) -> Callable[[Draft, ServingFacts], str]:
    """Refuses an input that the model cannot use: without it, the result is not what was asked for."""

    def rule(draft: Draft, facts: ServingFacts) -> str:
        value = getattr(draft.inputs, name, None) if hasattr(draft.inputs, name) else getattr(draft, name)
        # zero is a value like others
        if value in (None, "", ()) or name in facts.checkpoint.spec.takes:
            return ""
        if name == "duration" and counts_frames(draft, facts.checkpoint):
            return ""
        return f"is not supported by {facts.checkpoint.spec.name}; leave it unset"

    return rule


def _required(name: str) -> Callable[[Draft, ServingFacts], str]:
    def rule(draft: Draft, facts: ServingFacts) -> str:
        wanted = draft.task in REQUIRED[name]
        return f"is required for {draft.task}" if wanted and not getattr(draft.inputs, name) else ""

    return rule


def _mask(draft: Draft, facts: ServingFacts) -> str:
    mask, first = draft.inputs.mask, next(iter(draft.inputs.images), None)
    if mask is None or first is None or (mask.width, mask.height) == (first.width, first.height):
        return ""
    return f"is {mask.width} x {mask.height}, but the first image is {first.width} x {first.height}; resize one of them"


def _duration(draft: Draft, facts: ServingFacts) -> str:
    return duration_fault(draft, facts.checkpoint)


def _extra(draft: Draft, facts: ServingFacts) -> str:
    if not draft.extra or "extra" in facts.checkpoint.spec.takes:
        return ""
    return f"{facts.checkpoint.spec.name} has no extra parameters ({', '.join(draft.extra)}); leave it unset"


def _scheduler(draft: Draft, facts: ServingFacts) -> str:
    offered = facts.checkpoint.schedulers
    if not draft.scheduler or draft.scheduler in offered:
        return ""
    name = facts.checkpoint.spec.name
    return f"{name} has no {draft.scheduler!r}; it has {', '.join(offered) or 'none to choose from; leave it unset'}"


def _sigmas(draft: Draft, facts: ServingFacts) -> str:
    if not draft.sigmas:
        return ""
    checkpoint = facts.checkpoint
    why = sigmas_fault(draft.scheduler or checkpoint.scheduler, checkpoint)
    return f"cannot be used: {why}; leave it unset" if why else sigmas_rule(draft, facts.limits.max_steps)


def _shift(draft: Draft, facts: ServingFacts) -> str:
    if draft.shift is None:
        return ""
    checkpoint = facts.checkpoint
    why = shift_fault(draft.scheduler or checkpoint.scheduler, checkpoint)
    return f"cannot be used: {why}; leave it unset" if why else shift_rule(draft)


def _preset(draft: Draft, facts: ServingFacts) -> str:
    return preset_fault(draft, facts.checkpoint, facts.found.loras)


def _images(draft: Draft, facts: ServingFacts) -> str:
    count, most = len(draft.inputs.images), facts.checkpoint.limits.max_input_images
    return f"has {count} images; {facts.checkpoint.spec.name} takes at most {most}" if count > most else ""


def _frames(draft: Draft, facts: ServingFacts) -> str:
    limits, value = facts.checkpoint.limits, draft.num_frames
    if value is None or not limits.max_frames:
        return ""
    nearest = nearest_frames(value, limits)
    if not 1 <= value <= limits.max_frames:
        return f"{value} is outside 1..{limits.max_frames}; nearest valid value: {nearest}"
    if (value - limits.frame_offset) % limits.frame_multiple:
        rule = f"a multiple of {limits.frame_multiple} plus {limits.frame_offset}"
        return f"{value} is not {rule}; nearest valid value: {nearest}"
    given = [name for name in ("first_frame", "last_frame") if getattr(draft.inputs, name) is not None]
    if value <= len(given):
        more = nearest + limits.frame_multiple
        return f"{value} leaves no frames to generate besides {' and '.join(given)}; nearest valid value: {more}"
    return ""


def _between(name: str, low: float, high: Callable[[ServingFacts], float]) -> Callable[[Draft, ServingFacts], str]:
    def rule(draft: Draft, facts: ServingFacts) -> str:
        value = getattr(draft, name)
        if value is None or (math.isfinite(value) and low <= value <= high(facts)):
            return ""
        return f"{value:g} is outside {low:g}..{high(facts):g}"

    return rule


def _format(draft: Draft, facts: ServingFacts) -> str:
    kind = type(OUTPUT_FORMATS[draft.task.modality])
    if draft.output_format is None or isinstance(draft.output_format, kind):
        return ""
    return f"{draft.output_format} is not a format for {draft.task}; use one of {', '.join(kind)}"


def _embedding(draft: Draft, facts: ServingFacts) -> str:
    chosen = draft.output_format
    if not draft.embed_parameters or chosen is None or has_place(chosen):
        return ""
    formats = ", ".join(kind for kind in type(chosen) if has_place(kind))
    return f"{chosen} has no place for texts; choose the output_format {formats}, or leave embed_parameters out"


def _loras(draft: Draft, facts: ServingFacts) -> str:
    if len(draft.loras) > MAX_LORAS:
        return f"has {len(draft.loras)} entries; the maximum is {MAX_LORAS}"
    if len({(lora.lora_id, lora.target) for lora in draft.loras}) < len(draft.loras):
        return "names an adapter twice; name it once, with the sum of both scales"
    needed, limit = sum(copies(draft.loras, facts.found.loras).values()), facts.found.lora_merged_cache
    if needed > limit:
        return (
            f"needs {size_text(needed)} of weights with adapters merged into them, and this server has "
            f"{size_text(limit)} for them; start it with --lora-merged-cache {needed}, use fewer such adapters at "
            "once, or fold one into the checkpoint with omni-grpc lora merge"
        )
    return ""


def _each_lora(rule: Callable[[Lora, ServingFacts], str]) -> Callable[[Draft, ServingFacts], str]:
    """A rule for every adapter of a request."""
    return lambda draft, facts: next((found for lora in draft.loras if (found := rule(lora, facts))), "")


def _lora_id(lora: Lora, facts: ServingFacts) -> str:
    if any(adapter.id == lora.lora_id for adapter in facts.found.loras):
        return ""
    known = ", ".join(dict.fromkeys(adapter.id for adapter in facts.found.loras))
    loaded = f"loaded: {known}" if known else "load it with LoadLora, or start the server with --lora NAME=PATH"
    return f"{lora.lora_id!r} {facts.lora_faults.get(lora.lora_id, 'is not loaded')}; {loaded}"


def _lora_scale(lora: Lora, facts: ServingFacts) -> str:
    if -MAX_LORA_SCALE <= lora.scale <= MAX_LORA_SCALE:
        return ""
    return f"{lora.scale:g} is outside {-MAX_LORA_SCALE:g}..{MAX_LORA_SCALE:g}"


def _lora_target(lora: Lora, facts: ServingFacts) -> str:
    adapter = newest(facts.found.loras, lora.lora_id)
    # of one that no worker has loaded yet they are not known
    targets = (lora.target,) if adapter is None or not adapter.applied else adapter.targets
    if lora.target in ("", *targets):
        return ""
    return f"{lora.target!r} is not a component that {lora.lora_id!r} changes; it changes {', '.join(targets)}"


def _cache_off(draft: Draft, facts: ServingFacts) -> str:
    if draft.cache is None or not draft.cache.off or not facts.found.fixed_cache:
        return ""
    name = facts.found.fixed_cache.name
    return f"the step cache of this server, {name}, is on for every request and cannot be turned off"


def _cache_on(draft: Draft, facts: ServingFacts) -> str:
    if draft.cache is None or draft.cache.off or facts.cache is not None:
        return ""
    return "this server runs without a step cache for requests; start it with --cache-backend auto, or a method"


def _cache_field(method: str, field: str) -> Callable[[Draft, ServingFacts], str]:
    """A rule for a field of a cache. What nobody gave may not fit the request either."""

    def rule(draft: Draft, facts: ServingFacts) -> str:
        steps = len(draft.sigmas) or draft.steps or facts.checkpoint.defaults.steps
        if facts.cache is None or facts.cache.asked(draft.cache, steps)[0] != method:
            return ""
        return dict(facts.cache.faults(draft.cache, steps, facts.found.cached_blocks)).get(f"{method}.{field}", "")

    return rule


Rule = Callable[[Draft, ServingFacts], str]
"""What is wrong with a draft, or ""."""

MEDIA_RULES: frozenset[Rule] = frozenset({_mask, _duration})
"""Rules that look into the inputs. The others want to know at most which there are, so they come first."""

RULES: tuple[tuple[str, Rule], ...] = (
    ("prompt", _prompt),
    ("negative_prompt", _text("negative_prompt")),
    ("width", _size("width")),
    ("height", _size("height")),
    ("width, height", _pixels),
    ("sampling.steps", _count("steps", lambda facts: facts.limits.max_steps)),
    ("sampling.num_outputs", _count("num_outputs", lambda facts: facts.limits.max_outputs)),
    ("sampling.seeds", _seeds),
    ("sampling.scheduler", _scheduler),
    ("sampling.preset", _preset),
    ("sampling.sigmas", _sigmas),
    ("sampling.shift", _shift),
    *((name, _taken(name)) for name in TAKEN),
    *((name, _required(name)) for name in REQUIRED),
    ("images", _images),
    ("mask", _mask),
    ("num_frames", _frames),
    ("layers", _count("layers", lambda facts: MAX_LAYERS)),
    ("strength", _between("strength", 0.0, lambda facts: 1.0)),
    ("fps", _between("fps", 1.0, lambda facts: 240.0)),
    ("output_fps", _between("output_fps", 1.0, lambda facts: 240.0)),
    ("duration", _between("duration", 0.01, lambda facts: facts.checkpoint.limits.max_duration or 3600.0)),
    ("duration", _duration),
    ("sampling.extra", _extra),
    ("sampling.loras", _loras),
    ("sampling.loras.lora_id", _each_lora(_lora_id)),
    ("sampling.loras.scale", _each_lora(_lora_scale)),
    ("sampling.loras.target", _each_lora(_lora_target)),
    ("sampling.cache.off", _cache_off),
    ("sampling.cache", _cache_on),
    *(
        (f"sampling.cache.{method}.{field}", _cache_field(method, field))
        for method, fields in FIELDS.items()
        for field in fields
    ),
    ("start", _between("start", 0.0, lambda facts: 3600.0)),
    ("sample_rate_hz", _between("sample_rate_hz", 8000, lambda facts: 192_000)),
    ("output_format", _format),
    ("options.embed_parameters", _embedding),
    ("sampling.guidance.scale", _scale("scale", 0.0, 100.0)),
    ("sampling.guidance.true_cfg_scale", _scale("true_cfg_scale", 0.0, 100.0)),
    ("sampling.guidance.scale_low_noise", _scale("scale_low_noise", 0.0, 100.0)),
    ("sampling.guidance.boundary_ratio", _scale("boundary_ratio", 0.0, 1.0)),
    ("sampling.guidance.rescale", _scale("rescale", 0.0, 1.0)),
    ("sampling.guidance.interval_start", _scale("interval_start", 0.0, 1.0)),
    ("sampling.guidance.interval_end", _scale("interval_end", 0.0, 1.0)),
    ("sampling.guidance.interval_start, sampling.guidance.interval_end", _interval),
    ("options.preview.every_steps", _preview_rule("every_steps", 1, 10_000)),
    ("options.preview.max_edge_px", _preview_rule("max_edge_px", 16, 512)),
)
