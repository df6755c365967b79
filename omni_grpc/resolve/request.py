"""Every decision made for the user: what a request gets by default. What is worth a warning is in `advice`.

`resolve_request` runs before any work: it makes a complete Request of a Draft, or raises one InvalidArgument that names
each offending field, its value, the rule and the nearest valid value (see `rules`).
"""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from omni_grpc.config import LimitsConfig
from omni_grpc.resolve.advice import ADVICE, CFG_FIELDS
from omni_grpc.resolve.draft import requested
from omni_grpc.resolve.frames import count_frames, frames_within, nearest_frames
from omni_grpc.resolve.presets import complete
from omni_grpc.resolve.rules import MEDIA_RULES, OUTPUT_FORMATS, REQUIRED, RULES, Rule, ServingFacts, takes
from omni_grpc.types.errors import FailedPrecondition, InvalidArgument, NotFound, Violation
from omni_grpc.types.lora import Lora, newest
from omni_grpc.types.media import ImageInput, Inputs, Modality, OutputFormat
from omni_grpc.types.preset import NO_PRESET
from omni_grpc.types.request import MAX_SEED, Draft, Guidance, GuidanceDraft, Request, Task, has_negative
from omni_grpc.types.requested import Embedding
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import Checkpoint, GuidanceKind
from omni_grpc.types.step_cache import method_of
from omni_grpc.types.written import written

T = TypeVar("T")

ENCODING = frozenset({"output_fps", "sample_rate_hz"})
"""Fields about the encoded file, not about the model."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A complete request, what to tell its user about it, and which fields got a default."""

    request: Request
    warnings: tuple[RequestWarning, ...]
    defaults_used: Mapping[str, str]


def resolve_request(draft: Draft, facts: ServingFacts, *, id: str) -> Resolved:
    """Checks and completes one request, which gets the name `id`.

    Raises NotFound for a model this server does not have, FailedPrecondition (TASK_NOT_SUPPORTED) for a task the model
    lacks, InvalidArgument for everything else that breaks a row of RULES.
    """
    check_task(draft.model, draft.task, facts.checkpoint)
    facts = dataclasses.replace(facts, checkpoint=facts.checkpoint.of(draft.task))
    preset = complete(draft, facts.checkpoint, facts.found.loras)
    _check_rules(preset.draft, facts, RULES)
    asked = requested(draft, facts.checkpoint.name) if draft.embed_parameters else None
    full, rounded = count_frames(preset.draft, facts.checkpoint)
    request, defaults_used = _complete(full, facts, id)
    defaults_used |= preset.set_by_preset
    if asked is not None:
        request = dataclasses.replace(request, embedding=Embedding(asked=asked, defaults_used=defaults_used))
    # what a preset sets was not asked for
    advised = tuple(warning for advice in ADVICE if (warning := advice(draft, request, facts)))
    warnings = rounded + preset.warnings + advised
    return Resolved(request=request, warnings=warnings, defaults_used=defaults_used)


def check_draft(draft: Draft, facts: ServingFacts) -> None:
    """What `resolve_request` refuses without a look into the inputs. Which of them there are is known."""
    check_task(draft.model, draft.task, facts.checkpoint)
    facts = dataclasses.replace(facts, checkpoint=facts.checkpoint.of(draft.task))
    draft = complete(draft, facts.checkpoint, facts.found.loras).draft
    _check_rules(draft, facts, [row for row in RULES if row[1] not in MEDIA_RULES])


def _check_rules(draft: Draft, facts: ServingFacts, rules: Iterable[tuple[str, Rule]]) -> None:
    violations = tuple(
        Violation(_path(field, draft.task), message) for field, rule in rules if (message := rule(draft, facts))
    )
    if violations:
        raise InvalidArgument("; ".join(f"{v.field}: {v.description}" for v in violations), violations=violations)


def check_model(model: str, checkpoint: Checkpoint) -> None:
    """Raises NotFound for a model this server does not have. An empty name is that of the only one it has."""
    if model and model != checkpoint.name:
        message = f"model {model!r} is not served here; this server has {checkpoint.name}"
        raise NotFound(message, reason="MODEL_NOT_FOUND", metadata={"name": model})


def check_task(model: str, task: Task, checkpoint: Checkpoint) -> None:
    """Raises NotFound for a model this server does not have, FailedPrecondition (TASK_NOT_SUPPORTED) for a task the
    model lacks.
    """
    check_model(model, checkpoint)
    if task not in checkpoint.tasks:
        has = ", ".join(checkpoint.tasks)
        why = f": {checkpoint.refusals[task]}" if task in checkpoint.refusals else ""
        raise FailedPrecondition(
            f"model {checkpoint.name!r} does not support {task}{why}; supported tasks: {has}",
            reason="TASK_NOT_SUPPORTED",
            metadata={"task": task.value, "tasks": has},
        )


def _path(field: str, task: Task) -> str:
    """The path of a field in the API. The sound that a sound starts from is its reference."""
    return "reference" if field == "audio" and task.modality is Modality.AUDIO else field


# --- defaults -------------------------------------------------------------------------------------------------------


def _complete(draft: Draft, facts: ServingFacts, id: str) -> tuple[Request, dict[str, str]]:
    defaults = facts.checkpoint.defaults
    used: dict[str, str] = {} if draft.model else {"model": facts.checkpoint.name}

    def default(field: str, asked: T | None, value: T) -> T:
        if asked is not None:
            return asked
        used[field] = written(value)
        return value

    if not has_negative(draft) and defaults.negative_prompt is not None:
        against = dataclasses.replace(draft, negative_prompt=defaults.negative_prompt)
        if cfg_is_on(against, facts):
            draft, used["negative_prompt"] = against, defaults.negative_prompt
    outputs = default("sampling.num_outputs", draft.num_outputs, max(1, len(draft.seeds)))
    seeds = draft.seeds or (secrets.randbelow(MAX_SEED - outputs),)
    if not draft.seeds:
        used["sampling.seeds"] = "random"
    guidance = _complete_guidance(draft, facts, default, used)
    width, height = _complete_size(draft, facts, default)
    output_format: OutputFormat = default("output_format", draft.output_format, OUTPUT_FORMATS[draft.task.modality])
    lengths = {
        name: _complete_optional(draft, facts, name, used)
        for name in ("strength", "layers", "num_frames", "fps", "output_fps", "duration", "start", "sample_rate_hz")
    }
    steps = len(draft.sigmas) or default("sampling.steps", draft.steps, defaults.steps)
    cache = None if facts.cache is None else facts.cache.complete(draft.cache, steps)
    if cache is not None and draft.cache is None:
        used["sampling.cache"] = method_of(cache)
    request = Request(
        id=id,
        model=facts.checkpoint.name,
        prompt=draft.prompt,
        task=draft.task,
        negative_prompt=draft.negative_prompt if takes("negative_prompt", facts) or cfg_is_on(draft, facts) else None,
        width=width,
        height=height,
        steps=steps,
        guidance=guidance,
        seeds=tuple(seeds[0] + i for i in range(outputs)) if len(seeds) == 1 else seeds,
        num_outputs=outputs,
        output_format=output_format,
        preview=draft.preview,
        inputs=draft.inputs,
        text=draft.text,
        scheduler=draft.scheduler,
        scheduler_config=draft.scheduler_config,
        shift=draft.shift,
        sigmas=draft.sigmas,
        preset="" if draft.preset == NO_PRESET else draft.preset,
        loras=tuple(_resolved(lora, facts) for lora in draft.loras),
        cache=cache,
        extra=draft.extra,
        **lengths,
    )
    return request, used


def _resolved(lora: Lora, facts: ServingFacts) -> Lora:
    """The adapter of a request as it is loaded now. What is loaded under its id later is another one."""
    adapter = newest(facts.found.loras, lora.lora_id)
    return lora if adapter is None else dataclasses.replace(lora, uid=adapter.key)


def _complete_guidance(
    draft: Draft, facts: ServingFacts, default: Callable[[str, Any, Any], Any], used: dict[str, str]
) -> Guidance:
    defaults = facts.checkpoint.defaults.guidance
    scale = None
    usual, guided = _usual_scale(draft, facts)
    if guided:
        scale = default("sampling.guidance.scale", draft.guidance.scale, usual)
    rescale = 0.0
    if takes("rescale", facts):
        rescale = default("sampling.guidance.rescale", draft.guidance.rescale, defaults.rescale)
    boundary = defaults.boundary_ratio
    if boundary is not None:
        boundary = default("sampling.guidance.boundary_ratio", draft.guidance.boundary_ratio, boundary)
    guidance = Guidance(
        scale=scale,
        rescale=rescale,
        scale_low_noise=draft.guidance.scale_low_noise if takes("scale_low_noise", facts) else None,
        boundary_ratio=boundary,
    )
    if cfg_is_on(draft, facts):
        filled = {
            name: default(f"sampling.guidance.{name}", getattr(draft.guidance, name), getattr(defaults, name))
            for name in CFG_FIELDS
        }
        low_noise = None
        if boundary is not None:
            same, usual = draft.guidance.true_cfg_scale, defaults.scale_low_noise
            asked = draft.guidance.scale_low_noise if draft.guidance.scale_low_noise is not None else same
            low_noise = default("sampling.guidance.scale_low_noise", asked, usual)
        guidance = Guidance(scale=scale, scale_low_noise=low_noise, boundary_ratio=boundary, **filled)
    # what a default leaves as it is was not decided for the user
    for name in CFG_FIELDS:
        if getattr(guidance, name) == getattr(Guidance(), name):
            used.pop(f"sampling.guidance.{name}", None)
    return guidance


def _usual_scale(draft: Draft, facts: ServingFacts) -> tuple[float | None, bool]:
    """The scale unless one is asked for, and whether this prompt is guided by one."""
    defaults, guided = facts.checkpoint.defaults, GuidanceKind.EMBEDDED in facts.checkpoint.guidance
    if (rule := defaults.prompt_scale) is None:
        return defaults.guidance.scale, guided
    embeds = draft.extra.get(rule.embeds)
    # only a caller in the same process has tensors; anything else is refused later
    given = bool(embeds.any()) if hasattr(embeds, "any") else True
    found = given if embeds is not None else re.search(rule.pattern, draft.prompt) is not None
    usual = rule.found if found else rule.otherwise
    return usual, guided and usual is not None


def _complete_size(
    draft: Draft, facts: ServingFacts, default: Callable[[str, int | None, int], int]
) -> tuple[int, int]:
    """Sound has no size; an edit has the shape of its first image or its video, and its size unless the model makes
    another, brought to a legal one.
    """
    if draft.task.modality is Modality.AUDIO:
        return 0, 0
    defaults, limits = facts.checkpoint.defaults, facts.checkpoint.limits
    width, height = defaults.width, defaults.height
    first = next(iter(draft.inputs.images), draft.inputs.first_frame or draft.inputs.source_video)
    if first is not None:
        area = first.width * first.height
        scale = math.sqrt(min(facts.max_pixels, defaults.image_area or area) / area)
        # the root may end just below a whole number
        sides = (int(side * scale + 1e-6) for side in (first.width, first.height))
        width, height = (
            min(max(side // limits.size_multiple * limits.size_multiple, limits.min_size), limits.max_size)
            for side in sides
        )
    return default("width", draft.width, width), default("height", draft.height, height)


def _complete_optional(draft: Draft, facts: ServingFacts, name: str, used: dict[str, str]) -> Any:
    """A field that only some models use: None for the others, else as asked, else the model's default."""
    asked = getattr(draft, name)
    if name not in facts.checkpoint.spec.takes and name not in ENCODING:
        # how fast frames follow each other is a fact about a model, also where nobody can change it
        return facts.checkpoint.defaults.fps if name == "fps" and draft.task.modality is Modality.VIDEO else None
    if asked is None and (value := _usual(draft, facts, name)) is not None:
        used[name] = written(value)
        return value
    return asked


def _usual(draft: Draft, facts: ServingFacts, name: str) -> Any:
    """The model's default, or what a video that is given says: its rate, and its length where the model keeps that."""
    source, defaults = draft.inputs.source_video, facts.checkpoint.defaults
    # a file is played at the rate that a model generates for, where it is told one
    if source is not None and name == ("fps" if "fps" in facts.checkpoint.spec.takes else "output_fps"):
        return source.fps
    if source is not None and name == "num_frames" and defaults.frames_of_source:
        return frames_within(source.num_frames, facts.checkpoint.limits)
    return getattr(defaults, name, None)


def cfg_is_on(draft: Draft, facts: ServingFacts) -> bool:
    """Classifier-free guidance needs a model that has it, a negative prompt (even an empty one) and a scale above 1."""
    if GuidanceKind.TRUE_CFG not in facts.checkpoint.guidance or not has_negative(draft):
        return False
    scale = draft.guidance.true_cfg_scale
    return (facts.checkpoint.defaults.guidance.true_cfg_scale if scale is None else scale) > 1


# --- warm-up --------------------------------------------------------------------------------------------------------


def placeholder(checkpoint: Checkpoint, *, size: int, outputs: int, frames: int = 0) -> Request:
    """A synthetic request for measurements: square, one step, without guidance; for a video, `frames` or the nearest
    number that can be made. Required pictures are black.
    """
    task, limits = checkpoint.spec.tasks[0], checkpoint.limits
    black = ImageInput(size, size, 3, bytes(3 * size * size))
    mask = ImageInput(size, size, 1, bytes(size * size))
    pictures: dict[str, Any] = {"images": (black,), "mask": mask, "first_frame": black}
    draft = Draft(
        model=checkpoint.name,
        prompt="warm-up",
        task=task,
        inputs=Inputs(**{name: picture for name, picture in pictures.items() if task in REQUIRED[name]}),
        width=size,
        height=size,
        num_frames=nearest_frames(frames, limits) if limits.max_frames else None,
        steps=1,
        num_outputs=outputs,
        seeds=(0,),
        guidance=GuidanceDraft(true_cfg_scale=1.0),
        preset=NO_PRESET,
    )
    return resolve_request(draft, ServingFacts(checkpoint, LimitsConfig()), id="warm-up").request
