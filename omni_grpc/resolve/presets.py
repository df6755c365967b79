"""Presets: which of a model's a request gets, whether it can be used, and what it sets.

A preset completes a draft before anything else looks at it, so that the rules and the defaults see one request. What
the request says itself stays, with a warning where the preset says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from omni_grpc.feature_rules.base import is_native
from omni_grpc.types.lora import Adapter, Lora
from omni_grpc.types.preset import NO_PRESET, Preset
from omni_grpc.types.request import Draft, GuidanceDraft
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import Checkpoint
from omni_grpc.types.written import written

FLOW_SCHEDULERS = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
"""Classes whose levels and shift a request may give. UniPC's it may where its levels are those of flow matching."""
UNIPC = "UniPCMultistepScheduler"

MAX_SHIFT = 1000.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A draft with what its preset sets; `preset` is None where it has none. `set_by_preset`: field -> value, as
    text, that the preset set.
    """

    draft: Draft
    preset: Preset | None = None
    warnings: tuple[RequestWarning, ...] = ()
    set_by_preset: Mapping[str, str] = dataclasses.field(default_factory=dict)


def complete(draft: Draft, checkpoint: Checkpoint, loaded: Collection[Adapter]) -> Completed:
    """The draft with what its preset sets. One that `preset_fault` refuses sets nothing."""
    preset = _chosen(draft, checkpoint)
    if preset is None or obstacle(preset, checkpoint, loaded):
        return Completed(draft=draft)
    made, used = _filled(draft, preset)
    if not draft.preset:
        used["sampling.preset"] = preset.name
    return Completed(draft=made, preset=preset, warnings=tuple(_overridden(draft, preset)), set_by_preset=used)


def preset_fault(draft: Draft, checkpoint: Checkpoint, loaded: Collection[Adapter]) -> str:
    """What is wrong with the preset of a request, or ""."""
    name = draft.preset or checkpoint.recipe
    if name in ("", NO_PRESET):
        return ""
    preset = _chosen(draft, checkpoint)
    if preset is None:
        usable = [one.name for one in checkpoint.presets if not obstacle(one, checkpoint, loaded)]
        others = [one.name for one in checkpoint.presets if one.name not in usable]
        has = f"it has {', '.join(usable)}" if usable else "it has none that can be used now"
        more = f"; {', '.join(others)} cannot be used now, ListModels says why" if others else ""
        return f"{checkpoint.name} has no preset {name!r}; {has}{more}"
    why = obstacle(preset, checkpoint, loaded)
    default = "" if draft.preset else f", which is the default here; {NO_PRESET!r} is without a preset"
    return f"{name!r} {why}{default}" if why else ""


def obstacle(preset: Preset, checkpoint: Checkpoint, loaded: Collection[Adapter]) -> str:
    """Why a preset of a checkpoint cannot be used now, phrased to follow its name, or ""."""
    if preset.scheduler and preset.scheduler not in checkpoint.schedulers:
        has = ", ".join(checkpoint.schedulers) or "none to choose from"
        return f"needs the scheduler {preset.scheduler}; {checkpoint.spec.name} has {has}"
    scheduler = preset.scheduler or checkpoint.scheduler
    if preset.sigmas and (why := sigmas_fault(scheduler, checkpoint)):
        return f"sets sigmas, and {why}"
    if (preset.shift is not None or preset.scheduler_config) and (why := shift_fault(scheduler, checkpoint)):
        return f"sets the shift, and {why}"
    known = {adapter.id for adapter in loaded}
    if missing := [one.lora.lora_id for one in preset.loras if one.lora.lora_id not in known]:
        several = "LoRA adapters" if len(missing) > 1 else "LoRA adapter"
        flags = " ".join(f"--lora {name}=FILE" for name in missing)
        return f"needs the {several} {', '.join(missing)}, not loaded here; load with {flags} or --recipe {preset.name}"
    return ""


def sigmas_fault(scheduler: str, checkpoint: Checkpoint) -> str:
    """Why this scheduler of a checkpoint takes no noise levels, or ""."""
    if not is_native(checkpoint):
        return "" if "sigmas" in checkpoint.spec.takes else f"{checkpoint.spec.name} takes no noise levels (sigmas)"
    return _flow_fault(scheduler, checkpoint)


def shift_fault(scheduler: str, checkpoint: Checkpoint) -> str:
    """Why this scheduler of a checkpoint takes no shift of a request, or ""."""
    if not is_native(checkpoint):
        return "" if "shift" in checkpoint.spec.takes else f"{checkpoint.spec.name} has no shift (of flow matching)"
    return _flow_fault(scheduler, checkpoint)


def _flow_fault(scheduler: str, checkpoint: Checkpoint) -> str:
    flow = checkpoint.configs.get("scheduler", {}).get("use_flow_sigmas")
    if scheduler in FLOW_SCHEDULERS or (scheduler == UNIPC and flow):
        return ""
    return f"the schedule of {scheduler or 'this model'} is its own"


def sigmas_rule(draft: Draft, most: int) -> str:
    """What is wrong with the noise levels of a draft, or ""."""
    levels = draft.sigmas
    if not levels:
        return ""
    if len(levels) > most:
        return f"has {len(levels)} levels; the maximum is {most}"
    for index, level in enumerate(levels):
        if not math.isfinite(level) or not 0 < level <= 1:
            return f"has {level:g} at position {index}; a level is above 0 and at most 1"
        if index and level >= levels[index - 1]:
            return f"has {level:g} after {levels[index - 1]:g} at position {index}; levels fall"
    if draft.steps is not None and draft.steps != len(levels):
        return f"has {len(levels)} levels for {draft.steps} steps; give one for each step, or leave steps unset"
    return ""


def shift_rule(draft: Draft) -> str:
    """What is wrong with the shift of a draft, or ""."""
    if draft.shift is None or (math.isfinite(draft.shift) and 0 < draft.shift <= MAX_SHIFT):
        return ""
    return f"{draft.shift:g} is not above 0 and at most {MAX_SHIFT:g}"


# --- what a preset sets -----------------------------------------------------------------------------------------------


def _chosen(draft: Draft, checkpoint: Checkpoint) -> Preset | None:
    name = draft.preset or checkpoint.recipe
    return next((preset for preset in checkpoint.presets if preset.name == name), None)


def _filled(draft: Draft, preset: Preset) -> tuple[Draft, dict[str, str]]:
    """The draft with the preset's values where it has none, and these by field."""
    values: dict[str, Any] = {}
    if draft.steps is None and not draft.sigmas:
        values |= {"steps": preset.steps, "sigmas": preset.sigmas}
    elif draft.steps == preset.steps and not draft.sigmas:
        values["sigmas"] = preset.sigmas
    if draft.shift is None:
        # a shift of the request stands for the whole rule
        values |= {"shift": preset.shift, "scheduler_config": preset.scheduler_config}
    if not draft.scheduler:
        values["scheduler"] = preset.scheduler
    values = {name: value for name, value in values.items() if value not in (None, (), {}, "")}
    guidance = {name: value for name, value in _guidance(preset) if getattr(draft.guidance, name) is None}
    named = {lora.lora_id for lora in draft.loras}
    added = tuple(one.lora for one in preset.loras if one.lora.lora_id not in named)
    used = {f"sampling.{name}": written(value) for name, value in values.items() if name != "scheduler_config"}
    used |= {f"sampling.guidance.{name}": written(value) for name, value in guidance.items()}
    if added:
        used["sampling.loras"] = ",".join(map(_told, added))
    made = dataclasses.replace(
        draft,
        **values,
        guidance=dataclasses.replace(draft.guidance, **guidance),
        loras=(*draft.loras, *added),
        preset=preset.name,
    )
    return made, used


def _guidance(preset: Preset) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(GuidanceDraft):
        if (value := getattr(preset.guidance, field.name)) is not None:
            yield field.name, value


def _told(lora: Lora) -> str:
    return f"{lora.lora_id}={lora.scale:g}" + (f" in {lora.target}" if lora.target else "")


def _overridden(draft: Draft, preset: Preset) -> Iterator[RequestWarning]:
    """A warning for each value of a request that is not the preset's."""
    if draft.steps is not None and preset.steps is not None and draft.steps != preset.steps:
        unused = ", and its sigmas are not used" if preset.sigmas and not draft.sigmas else ""
        yield _warning(preset, "steps", preset.steps, draft.steps, unused)
    if draft.sigmas and (preset.sigmas or preset.steps) and draft.sigmas != preset.sigmas:
        told = preset.sigmas or f"the usual ones of {preset.steps} steps"
        yield _warning(preset, "sigmas", told, draft.sigmas)
    if draft.shift is not None and draft.shift != preset.shift:
        if preset.shift is not None:
            yield _warning(preset, "shift", preset.shift, draft.shift)
        elif preset.scheduler_config:
            yield _warning(preset, "shift", preset.scheduler_config, draft.shift)
    if draft.scheduler and preset.scheduler and draft.scheduler != preset.scheduler:
        yield _warning(preset, "scheduler", preset.scheduler, draft.scheduler)
    for name, value in _guidance(preset):
        asked = getattr(draft.guidance, name)
        if asked is not None and asked != value:
            yield _warning(preset, f"guidance.{name}", value, asked)
    mine = {one.lora.lora_id: one.lora for one in preset.loras}
    for lora in draft.loras:
        if (own := mine.get(lora.lora_id)) is not None and lora != own:
            yield _warning(preset, "loras", _told(own), _told(lora))


def _warning(preset: Preset, field: str, own: Any, asked: Any, more: str = "") -> RequestWarning:
    why = "; its adapter was made for that, and the result may suffer" if preset.loras else ""
    return RequestWarning(
        code="PRESET_OVERRIDDEN",
        field=f"sampling.{field}",
        message=f"the preset {preset.name} sets it to {written(own)}{more}{why}",
        requested=written(asked),
        applied=written(asked),
    )
