"""The mix of requests: classes with weights, of which each has its options, its prompts and perhaps its objectives."""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from omni_grpc.cli.batch import limits
from omni_grpc.cli.bench.serve.slo import Slo, slo
from omni_grpc.cli.requests import request_of
from omni_grpc.config.command_line import meant
from omni_grpc.scenes.captions import held_out
from omni_grpc.types.errors import ConfigError, InvalidArgument, OmniError, Violation
from omni_grpc.types.request import MAX_SEED
from omni_grpc.types.request_options import ALL, EDIT, IMAGE, options_of
from omni_grpc.v1.model_pb2 import Model

PROMPTS = 64
"""Prompts where none are given: many, since a server keeps the encoded prompt of a request that comes again."""
_KEYS = ("name", "weight", "kind", "prompt", "prompts", "options", "fields", "slo")
_SHORT = re.compile(r"(\d+)x(\d+)(?::(\d+))?(?::(\d+(?:\.\d*)?|\.\d+))?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixClass:
    """One class. `weight`: how many come of it, against the other weights. `kind`: what is made,
    empty: that of the run. `options`: those of the client, by name;
    `fields`: further fields of the request, as the API has them in JSON. `slo`: its objectives, None: those of the run.
    """

    name: str
    weight: float = 1.0
    kind: str = ""
    prompts: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    slo: Slo | None = None

    def as_dict(self) -> dict[str, Any]:
        content = {**dataclasses.asdict(self), "prompts": len(self.prompts), "options": _plain(self.options)}
        return content | {"slo": None if self.slo is None else dict(self.slo.limits)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What classes have that do not say it themselves."""

    kind: str = IMAGE
    prompts: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def completed(self, klass: MixClass) -> MixClass:
        prompts = klass.prompts or self.prompts or default_prompts()
        kind, options = klass.kind or self.kind, {**self.options, **klass.options}
        return dataclasses.replace(klass, kind=kind, prompts=prompts, options=options)


class Requests:
    """Makes the requests of a run. Every class is made once before, so that what is wrong is told before any work.

    Raises ConfigError that names each class and field that is wrong.
    """

    def __init__(self, model: Model, classes: Sequence[MixClass], seed: int) -> None:
        self._seed = seed
        self._templates: dict[str, Message] = {}
        self._classes = {klass.name: klass for klass in classes}
        faults = []
        for klass in classes:
            wrong = list(_faults(model, klass))
            if not wrong:
                try:
                    self._templates[klass.name] = _template(model.name, klass)
                except (ParseError, OmniError, OSError) as error:
                    wrong = list(_wrong(error))
            faults += [Violation(f"{klass.name}: {field}", why) for field, why in wrong]
        if faults:
            said = "; ".join(f"{fault.field} {fault.description}" for fault in faults)
            raise ConfigError(f"the mix has requests that cannot be sent: {said}", violations=tuple(faults))

    def make(self, number: int, name: str) -> Message:
        """Request `number` of the run, of the class with this name: with a seed of its own unless the class has one."""
        klass = self._classes[name]
        request: Any = type(self._templates[name])()
        request.CopyFrom(self._templates[name])
        request.prompt = klass.prompts[number % len(klass.prompts)]
        request.options.request_id = str(uuid.uuid4())
        if not request.sampling.HasField("seed") and not request.sampling.seeds:
            request.sampling.seed = (self._seed + number) % MAX_SEED
        made: Message = request
        return made


def picks(classes: Sequence[MixClass], seed: int) -> Iterator[str]:
    """The names of the classes of request after request, by their weights, without end."""
    chance = random.Random(f"mix {seed}")
    names, weights = [it.name for it in classes], [it.weight for it in classes]
    while True:
        yield from chance.choices(names, weights)


def mix(text: str) -> list[MixClass]:
    """The type of --mix: WIDTHxHEIGHT:STEPS:WEIGHT,... where steps and weight may be left out."""
    classes = []
    for part in text.split(","):
        match = _SHORT.fullmatch(part.strip())
        if match is None:
            rule = "expected WIDTHxHEIGHT:STEPS:WEIGHT,..., for example 512x512:20:3,1024x1024:30:1"
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is no class of requests: {rule}")
        options = {"width": int(match[1]), "height": int(match[2])} | ({"steps": int(match[3])} if match[3] else {})
        classes.append(MixClass(name=name_of(options), weight=float(match[4] or 1), options=options))
    _check(classes, "--mix")
    return classes


def mix_file(path: Path) -> list[MixClass]:
    """The type of --mix-file: a YAML list of classes, or a mapping with such a list under `classes`. Raises ConfigError
    that names what is wrong.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _refused(str(path), f"is no YAML: {' '.join(str(error).split())}") from error
    entries = content.get("classes") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise _refused(str(path), "has no list of classes")
    classes = [_class(f"{path}: class {number}", entry) for number, entry in enumerate(entries, start=1)]
    _check(classes, str(path))
    return classes


def name_of(options: Mapping[str, Any]) -> str:
    """What a class is called that has no name."""
    size = f"{options['width']}x{options['height']}" if {"width", "height"} <= options.keys() else "default size"
    return size + (f":{options['steps']}" if "steps" in options else "")


def default_prompts() -> tuple[str, ...]:
    """Captions of shapes, which the bundled model draws and any other model takes."""
    return tuple(text for _, text in held_out(PROMPTS, 0))


def _class(where: str, entry: Any) -> MixClass:
    if not isinstance(entry, dict):
        raise _refused(where, f"is {entry!r}, expected a mapping")
    kind = entry.get("kind", IMAGE)
    if kind not in ALL:
        raise _refused(f"{where}: kind", f"is {kind!r}, expected one of {', '.join(ALL)}")
    known = {option.name for option in options_of(kind)}
    for name in entry:
        if name not in _KEYS and name not in known:
            raise _refused(f"{where}: {name}", f"is no option of {kind}{meant(str(name), (*known, *_KEYS))}")
    options = {**entry.get("options", {}), **{name: value for name, value in entry.items() if name in known}}
    prompts = entry.get("prompts", [entry["prompt"]] if "prompt" in entry else [])
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise _refused(f"{where}: prompts", f"is {prompts!r}, expected a list of texts")
    weight = entry.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise _refused(f"{where}: weight", f"is {weight!r}, expected a number")
    return MixClass(
        name=str(entry.get("name", name_of(options))),
        weight=weight,
        kind=kind,
        prompts=tuple(prompts),
        options=options,
        fields=entry.get("fields", {}),
        slo=_slo(where, entry.get("slo")),
    )


def _slo(where: str, text: Any) -> Slo | None:
    if text is None:
        return None
    try:
        return slo(str(text))
    except argparse.ArgumentTypeError as error:
        raise _refused(f"{where}: slo", str(error)) from None


def _check(classes: Sequence[MixClass], where: str) -> None:
    names = [klass.name for klass in classes]
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise _refused(where, f"has {repeated[0]} twice; give each class a name of its own, or one weight")
    if any(not 0 <= klass.weight < float("inf") for klass in classes) or not sum(klass.weight for klass in classes):
        raise _refused(where, "has weights that are below 0, or all 0")


def _refused(field: str, why: str) -> ConfigError:
    return ConfigError(f"{field} {why}", violations=(Violation(field, why),))


def _faults(model: Model, klass: MixClass) -> Iterator[tuple[str, str]]:
    known = {option.name for option in options_of(klass.kind)}
    for name in klass.options:
        if name not in known:
            yield name, f"is no option of {klass.kind}{meant(name, sorted(known))}"
    if klass.kind == EDIT and not klass.options.get("images"):
        yield "images", "is missing, expected a list of files to edit"
    # types are checked where the request is made, values against what the model says
    numbers = {name: value for name, value in klass.options.items() if not isinstance(value, str)}
    for prompt in klass.prompts:
        yield from limits.faults(model, klass.kind, prompt, numbers)
        return  # the others differ by their text alone


def _template(model: str, klass: MixClass) -> Message:
    request = request_of(klass.kind, model, klass.prompts[0], klass.options)
    ParseDict(dict(klass.fields), request)
    return request


def _wrong(error: Exception) -> Iterator[tuple[str, str]]:
    if isinstance(error, InvalidArgument) and error.violations:
        yield from ((violation.field, violation.description) for violation in error.violations)
    elif isinstance(error, ParseError):
        yield "fields", f"cannot be sent: {' '.join(str(error).split())}"
    else:
        yield "options", f"cannot be sent: {error}"


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, int | float | str) else str(value) for name, value in options.items()}
