"""Every decision made for the user, in tables: what a request gets by default, what is refused, what is worth a
warning.

`resolve_request` runs before any work: it makes a complete Request of a Draft, or raises one InvalidArgument that names
 each offending field, its value, the rule and the nearest legal value. To add a rule, add a row.
"""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
from collections.abc import Callable, Mapping
from typing import TypeVar

from omni_grpc.config import LimitsConfig, ModelConfig
from omni_grpc.errors import ConfigError, FailedPrecondition, InvalidArgument, NotFound, Violation
from omni_grpc.request import Draft, Guidance, GuidanceNorm, ImageFormat, Request, RequestWarning
from omni_grpc.spec import Checkpoint, GuidanceKind

T = TypeVar("T")

CFG_FIELDS = ("true_cfg_scale", "norm", "rescale", "interval_start", "interval_end")
"""What belongs to guidance by a second prediction, and means nothing without one."""

MAX_SEED = 2**53 - 1
"""Largest seed: the largest integer that JSON, JavaScript and protobuf's Struct carry without loss."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A request ready for work, what to tell its user about it, and which fields got a default."""

    request: Request
    warnings: tuple[RequestWarning, ...]
    defaults_used: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What the rules may look at besides the request."""

    checkpoint: Checkpoint
    limits: LimitsConfig

    @property
    def max_pixels(self) -> int:
        own = self.checkpoint.limits.max_pixels
        return own if self.limits.max_pixels is None else min(own, self.limits.max_pixels)


def resolve_request(draft: Draft, facts: Facts, *, id: str) -> Resolved:
    """Checks and completes one request, which gets the name `id`.

    Raises NotFound for a model this server does not have, FailedPrecondition (TASK_NOT_SUPPORTED) for a task the model
    lacks, InvalidArgument for everything else that breaks a row of RULES.
    """
    checkpoint = facts.checkpoint
    if draft.model != checkpoint.name:
        message = f"model {draft.model!r} is not served here; served: {checkpoint.name}"
        raise NotFound(message, reason="MODEL_NOT_FOUND", metadata={"name": draft.model})
    if draft.task not in checkpoint.spec.tasks:
        has = ", ".join(checkpoint.spec.tasks)
        raise FailedPrecondition(
            f"model {draft.model!r} cannot do {draft.task}; its tasks: {has}",
            reason="TASK_NOT_SUPPORTED",
            metadata={"task": draft.task.value, "tasks": has},
        )
    violations = tuple(Violation(field, message) for field, rule in RULES if (message := rule(draft, facts)))
    if violations:
        raise InvalidArgument("; ".join(f"{v.field}: {v.description}" for v in violations), violations=violations)
    request, defaults_used = _complete(draft, facts, id)
    warnings = tuple(warning for advice in ADVICE if (warning := advice(draft, request, facts)))
    return Resolved(request=request, warnings=warnings, defaults_used=defaults_used)


# --- defaults -------------------------------------------------------------------------------------------------------


def _complete(draft: Draft, facts: Facts, id: str) -> tuple[Request, dict[str, str]]:
    defaults = facts.checkpoint.defaults
    used: dict[str, str] = {}

    def default(field: str, asked: T | None, value: T) -> T:
        if asked is not None:
            return asked
        used[field] = str(value)
        return value

    outputs = default("sampling.num_outputs", draft.num_outputs, max(1, len(draft.seeds)))
    seeds = draft.seeds or (secrets.randbelow(MAX_SEED - outputs),)
    if not draft.seeds:
        used["sampling.seeds"] = "drawn at random"
    scale = None
    if GuidanceKind.EMBEDDED in facts.checkpoint.spec.guidance:
        scale = default("sampling.guidance.scale", draft.guidance.scale, defaults.guidance.scale)
    guidance = Guidance(scale=scale)
    if cfg_is_on(draft, facts):
        filled = {
            name: default(f"sampling.guidance.{name}", getattr(draft.guidance, name), getattr(defaults.guidance, name))
            for name in CFG_FIELDS
        }
        guidance = Guidance(scale=scale, **filled)
        # what a default leaves as it is was not decided for the user
        for name in CFG_FIELDS:
            if filled[name] == getattr(Guidance(), name):
                used.pop(f"sampling.guidance.{name}", None)
    request = Request(
        id=id,
        model=draft.model,
        prompt=draft.prompt,
        task=draft.task,
        negative_prompt=draft.negative_prompt if cfg_is_on(draft, facts) else None,
        width=default("width", draft.width, defaults.width),
        height=default("height", draft.height, defaults.height),
        steps=default("sampling.steps", draft.steps, defaults.steps),
        guidance=guidance,
        seeds=tuple(seeds[0] + i for i in range(outputs)) if len(seeds) == 1 else seeds,
        num_outputs=outputs,
        output_format=default("output_format", draft.output_format, ImageFormat.PNG),
        preview=draft.preview,
    )
    return request, used


def cfg_is_on(draft: Draft, facts: Facts) -> bool:
    """Classifier-free guidance needs a model that has it, a negative prompt (even an empty one) and a scale above 1."""
    if GuidanceKind.TRUE_CFG not in facts.checkpoint.spec.guidance or draft.negative_prompt is None:
        return False
    scale = draft.guidance.true_cfg_scale
    return (facts.checkpoint.defaults.guidance.true_cfg_scale if scale is None else scale) > 1


# --- refusals: (field, rule); a rule returns what is wrong and the nearest legal value, or "" -----------------------


def _size(axis: str) -> Callable[[Draft, Facts], str]:
    def rule(draft: Draft, facts: Facts) -> str:
        value, limits = getattr(draft, axis), facts.checkpoint.limits
        if value is None:
            return ""
        nearest = round(value / limits.size_multiple) * limits.size_multiple
        nearest = min(max(nearest, limits.min_size), limits.max_size)
        if not limits.min_size <= value <= limits.max_size:
            return f"{value} is outside {limits.min_size}..{limits.max_size}; nearest legal value: {nearest}"
        if value % limits.size_multiple:
            return f"{value} is not a multiple of {limits.size_multiple}; nearest legal value: {nearest}"
        return ""

    return rule


def _pixels(draft: Draft, facts: Facts) -> str:
    defaults = facts.checkpoint.defaults
    width, height = draft.width or defaults.width, draft.height or defaults.height
    if width * height <= facts.max_pixels:
        return ""
    multiple = facts.checkpoint.limits.size_multiple
    shrink = math.sqrt(facts.max_pixels / (width * height))
    fit = tuple(max(multiple, int(side * shrink) // multiple * multiple) for side in (width, height))
    return f"{width} x {height} is more than {facts.max_pixels} pixels; the same shape fits as {fit[0]} x {fit[1]}"


def _count(name: str, most: Callable[[Facts], int]) -> Callable[[Draft, Facts], str]:
    def rule(draft: Draft, facts: Facts) -> str:
        value = getattr(draft, name)
        if value is None or 1 <= value <= most(facts):
            return ""
        return f"{value} is outside 1..{most(facts)}; nearest legal value: {min(max(value, 1), most(facts))}"

    return rule


def _scale(name: str, low: float, high: float) -> Callable[[Draft, Facts], str]:
    def rule(draft: Draft, facts: Facts) -> str:
        value = getattr(draft.guidance, name)
        if value is None:
            return ""
        if not math.isfinite(value) or not low <= value <= high:
            nearest = f"; nearest legal value: {min(max(value, low), high):g}" if not math.isnan(value) else ""
            return f"{value} is outside {low:g}..{high:g}{nearest}"
        return ""

    return rule


def _interval(draft: Draft, facts: Facts) -> str:
    start, end = draft.guidance.interval_start, draft.guidance.interval_end
    if (start if start is not None else 0.0) < (end if end is not None else 1.0):
        return ""
    return f"starts at {start or 0.0:g}, which is not before its end at {1.0 if end is None else end:g}"


def _preview_rule(name: str, low: int, high: int) -> Callable[[Draft, Facts], str]:
    def rule(draft: Draft, facts: Facts) -> str:
        value = getattr(draft.preview, name, None)
        if value is None or low <= value <= high:
            return ""
        return f"{value} is outside {low}..{high}; nearest legal value: {min(max(value, low), high)}"

    return rule


def _seeds(draft: Draft, facts: Facts) -> str:
    outputs = draft.num_outputs if draft.num_outputs is not None else max(1, len(draft.seeds))
    if len(draft.seeds) > 1 and len(draft.seeds) != outputs:
        return f"{len(draft.seeds)} seeds for {outputs} outputs; give one seed, or one for each output"
    last = outputs - 1 if len(draft.seeds) == 1 else 0
    for seed in draft.seeds:
        if not 0 <= seed <= MAX_SEED - last:
            return f"{seed} is outside 0..{MAX_SEED - last}; nearest legal value: {min(max(seed, 0), MAX_SEED - last)}"
    return ""


def _prompt(draft: Draft, facts: Facts) -> str:
    if not draft.prompt.strip():
        return "is empty; describe what to generate"
    return _text("prompt")(draft, facts)


def _text(name: str) -> Callable[[Draft, Facts], str]:
    def rule(draft: Draft, facts: Facts) -> str:
        value = getattr(draft, name)
        most = facts.limits.max_prompt_chars
        if value is not None and len(value) > most:
            return f"has {len(value)} characters, the most is {most}"
        if value is not None and "\0" in value:
            return f"has a NUL character at position {value.index(chr(0))}; remove it"
        if value is not None and (half := re.search(r"[\ud800-\udfff]", value)):
            return f"has half of a surrogate pair at position {half.start()}; remove it"
        return ""

    return rule


RULES: tuple[tuple[str, Callable[[Draft, Facts], str]], ...] = (
    ("prompt", _prompt),
    ("negative_prompt", _text("negative_prompt")),
    ("width", _size("width")),
    ("height", _size("height")),
    ("width, height", _pixels),
    ("sampling.steps", _count("steps", lambda facts: facts.limits.max_steps)),
    ("sampling.num_outputs", _count("num_outputs", lambda facts: facts.limits.max_outputs)),
    ("sampling.seeds", _seeds),
    ("sampling.guidance.scale", _scale("scale", 0.0, 100.0)),
    ("sampling.guidance.true_cfg_scale", _scale("true_cfg_scale", 0.0, 100.0)),
    ("sampling.guidance.rescale", _scale("rescale", 0.0, 1.0)),
    ("sampling.guidance.interval_start", _scale("interval_start", 0.0, 1.0)),
    ("sampling.guidance.interval_end", _scale("interval_end", 0.0, 1.0)),
    ("sampling.guidance.interval_start, sampling.guidance.interval_end", _interval),
    ("options.preview.every_steps", _preview_rule("every_steps", 1, 10_000)),
    ("options.preview.max_edge_px", _preview_rule("max_edge", 16, 512)),
)


# --- advice: rows that look at what was asked and what will be done -------------------------------------------------


def _scale_without_effect(draft: Draft, request: Request, facts: Facts) -> RequestWarning | None:
    if draft.guidance.scale is None or GuidanceKind.EMBEDDED in facts.checkpoint.spec.guidance:
        return None
    return RequestWarning(
        code="GUIDANCE_WITHOUT_EFFECT",
        field="sampling.guidance.scale",
        message=(
            f"{facts.checkpoint.spec.name} has no embedded guidance; "
            "use sampling.guidance.true_cfg_scale with a negative_prompt"
        ),
        requested=f"{draft.guidance.scale:g}",
    )


def _cfg_not_supported(draft: Draft, request: Request, facts: Facts) -> RequestWarning | None:
    if draft.guidance.true_cfg_scale is None or GuidanceKind.TRUE_CFG in facts.checkpoint.spec.guidance:
        return None
    return RequestWarning(
        code="GUIDANCE_WITHOUT_EFFECT",
        field="sampling.guidance.true_cfg_scale",
        message=f"{facts.checkpoint.spec.name} is not guided by a second prediction",
        requested=f"{draft.guidance.true_cfg_scale:g}",
    )


def _cfg_without_negative(draft: Draft, request: Request, facts: Facts) -> RequestWarning | None:
    if draft.negative_prompt is not None or (draft.guidance.true_cfg_scale or 0) <= 1:
        return None
    return RequestWarning(
        code="CFG_OFF",
        field="negative_prompt",
        message="true_cfg_scale needs a negative_prompt, which is not set; an empty one turns guidance on",
        requested=f"{draft.guidance.true_cfg_scale:g}",
        applied="1",
    )


def _negative_without_cfg(draft: Draft, request: Request, facts: Facts) -> RequestWarning | None:
    if draft.negative_prompt is None or request.negative_prompt is not None:
        return None
    return RequestWarning(
        code="NEGATIVE_PROMPT_WITHOUT_EFFECT",
        field="negative_prompt",
        message="guidance is off, so the negative prompt is not used; set sampling.guidance.true_cfg_scale above 1",
    )


def _needs_cfg(name: str) -> Callable[[Draft, Request, Facts], RequestWarning | None]:
    def advice(draft: Draft, request: Request, facts: Facts) -> RequestWarning | None:
        value = getattr(draft.guidance, name)
        if value in (None, getattr(Guidance(), name)) or request.negative_prompt is not None:
            return None
        return RequestWarning(
            code="GUIDANCE_WITHOUT_EFFECT",
            field=f"sampling.guidance.{name}",
            message="guidance by a second prediction is off",
            requested=str(value),
        )

    return advice


def _rescale_under_renorm(draft: Draft, request: Request, facts: Facts) -> RequestWarning | None:
    if not draft.guidance.rescale or request.guidance.norm is not GuidanceNorm.RENORM:
        return None
    return RequestWarning(
        code="GUIDANCE_WITHOUT_EFFECT",
        field="sampling.guidance.rescale",
        message="the norm RENORM sets the length of every token afterwards; use it with the norm NONE",
        requested=f"{draft.guidance.rescale:g}",
    )


ADVICE: tuple[Callable[[Draft, Request, Facts], RequestWarning | None], ...] = (
    _scale_without_effect,
    _cfg_not_supported,
    _cfg_without_negative,
    _negative_without_cfg,
    _rescale_under_renorm,
    *(_needs_cfg(name) for name in CFG_FIELDS if name != "true_cfg_scale"),
)


def advise_priority(priority: int, policy: str) -> tuple[RequestWarning, ...]:
    """What to tell a caller who asked for a priority that the server's policy does not look at."""
    if not priority or policy == "priority":
        return ()
    return (
        RequestWarning(
            code="PRIORITY_WITHOUT_EFFECT",
            field="options.priority",
            message=f"this server's policy is {policy!r}; it looks at priorities with --policy priority",
            requested=str(priority),
            applied="0",
        ),
    )


# --- the machine ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What a worker found: whether torch sees a CUDA device, and how many CPU cores the process may use."""

    cuda: bool
    cores: int


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a worker runs. `cpu_threads` is None where torch's own choice stands."""

    device: str
    dtype: str
    cpu_threads: int | None


def place(config: ModelConfig, machine: Machine) -> Placement:
    """Decides every "auto" of a worker. Raises ConfigError for a device that is not there."""
    if config.device == "cuda" and not machine.cuda:
        raise ConfigError("--device is 'cuda', but torch sees no CUDA device; use --device cpu", reason="NO_DEVICE")
    device = config.device if config.device != "auto" else ("cuda" if machine.cuda else "cpu")
    dtype = config.dtype if config.dtype != "auto" else {"cuda": "bfloat16", "cpu": "float32"}[device]
    threads = config.cpu_threads
    if device == "cpu" and threads is None:
        # one core stays with the server, so that events stay smooth while a step runs
        threads = max(1, machine.cores - 1)
    return Placement(device="cuda:0" if device == "cuda" else device, dtype=dtype, cpu_threads=threads)


def placeholder(checkpoint: Checkpoint, *, size: int, outputs: int) -> Request:
    """A request that nobody made, for measuring: square, one step, without guidance."""
    draft = Draft(
        model=checkpoint.name, prompt="warm-up", width=size, height=size, steps=1, num_outputs=outputs, seeds=(0,)
    )
    return resolve_request(draft, Facts(checkpoint, LimitsConfig()), id="warm-up").request
