"""From options to a Draft: what the server reads from a message and what `Omni` gets as keywords come together here."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Mapping
from typing import Any

from omni_grpc.types.cache_choice import cache_draft, chosen
from omni_grpc.types.lora import Lora, joined, split
from omni_grpc.types.media import Modality
from omni_grpc.types.request import Draft, GuidanceDraft, Task
from omni_grpc.types.request_options import (
    AUDIO,
    CACHE,
    EDIT,
    IMAGE,
    LORAS,
    MEDIA,
    MEDIA_LIST,
    VIDEO,
    exclusive_faults,
    options_of,
)
from omni_grpc.types.requested import Requested
from omni_grpc.types.step_cache import CacheDraft

Refuse = Callable[[str, str], None]
"""Records a field that is refused, by its path in the API, and why."""


def make_draft(kind: str, model: str, prompt: str, task: Task, given: Mapping[str, Any], refuse: Refuse) -> Draft:
    """The draft that the options of a request describe, without its media.

    `given` maps option names to values as `request_options.normalized` gives them; `loras` may be a sequence of Lora
    too, `cache` a CacheDraft, and `preview` is taken as it is.
    """
    for paths, fault in exclusive_faults(kind, given).items():
        refuse(paths, fault)
    fields: dict[str, Any] = {"preview": given["preview"]} if "preview" in given else {}
    guidance: dict[str, Any] = {}
    for option in options_of(kind):
        parent, _, field = option.draft.rpartition(".")
        if option.name not in given or parent == "inputs" or not field:
            continue
        (guidance if parent == "guidance" else fields)[field] = _drafted(option.name, given[option.name])
    draft = Draft(model=model, prompt=prompt, task=task, guidance=GuidanceDraft(**guidance), **fields)
    return _with_end(draft, given["end"], refuse) if "end" in given else draft


def requested(draft: Draft, model: str) -> Requested:
    """What a draft asks for, as it is written into files: the options from which `make_draft` makes it. `model` is the
    name of the model that it is for.
    """
    kind, unset = kind_of(draft.task), Draft(model="", prompt="")
    options: dict[str, Any] = {} if kind in (IMAGE, AUDIO) else {"task": draft.task.value}
    if draft.seeds:
        options |= {"seed": draft.seeds[0]} if len(draft.seeds) == 1 else {"seeds": list(draft.seeds)}
    for option in options_of(kind):
        if not option.draft or option.draft == "seeds" or option.of_job or option.type in (MEDIA, MEDIA_LIST):
            continue
        value = operator.attrgetter(option.draft)(draft)
        if value == operator.attrgetter(option.draft)(unset):
            continue
        if option.type is LORAS:
            value = {joined(lora.lora_id, lora.target): lora.scale for lora in value}
        if option.type is CACHE:
            value = chosen(value)
        # as JSON has them
        value = list(value) if isinstance(value, tuple) else value
        options[option.name] = value.value if isinstance(value, enum.Enum) else value
    return Requested(kind=kind, model=model, prompt=draft.prompt, options=options, inputs=draft.input_traits)


def kind_of(task: Task) -> str:
    """The kind of generation that a task belongs to."""
    if task.modality is not Modality.IMAGE:
        return VIDEO if task.modality is Modality.VIDEO else AUDIO
    return IMAGE if task is Task.TEXT_TO_IMAGE else EDIT


def _drafted(name: str, value: Any) -> Any:
    """An option's value as its field of a Draft."""
    match name:
        case "seed":
            return (value,)
        case "cache" if value is not None and not isinstance(value, CacheDraft):
            return cache_draft(value)
        case "loras" if isinstance(value, Mapping):
            asked = ((split(name), scale) for name, scale in value.items())
            return tuple(Lora(lora_id=lora_id, target=target, scale=scale) for (lora_id, target), scale in asked)
    return value


def _with_end(draft: Draft, end: float, refuse: Refuse) -> Draft:
    """The draft with a duration in place of the clip's end time."""
    start = draft.start or 0.0
    if end <= start:
        refuse("start, end", f"the end at {end:g} s is not after the start at {start:g} s")
    return dataclasses.replace(draft, duration=end - start)
