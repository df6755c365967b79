"""Which backend and precision each attention gets: by its role, and by step and layer."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from omni_grpc.config.backends import AUTO, SETTING, canonical, flag_of, refused

FIELD = "diffusion_attention_config"
PRECISIONS: Mapping[str, str] = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "int8": "int8",
}
"""What a setting may say, and the dtype that it is, or one of `backends.EIGHT_BIT`."""
RANGES = ("steps", "layers")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The choice for one role; "auto" defers to the next that applies. `field`: the setting that named the backend."""

    backend: str = AUTO
    precision: str = AUTO
    field: str = SETTING


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A precision for part of the denoising: from one fraction of the steps, and of the blocks of a stack, up to but
    not including another. 1 means to the end.
    """

    precision: str
    steps: tuple[float, float] = (0.0, 1.0)
    layers: tuple[float, float] = (0.0, 1.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """All choices. Of the schedule, the first window that covers a step and a layer applies."""

    default: Choice = Choice()
    per_role: Mapping[str, Choice] = dataclasses.field(default_factory=dict)
    schedule: tuple[Window, ...] = ()

    def of(self, role: str, category: str) -> Choice:
        """The role's choice, else its category's, else the default, for backend and precision separately; "auto" is the
        platform's.
        """
        asked = [self.per_role[name] for name in (role, category) if name in self.per_role] + [self.default]
        by = next((choice for choice in asked if choice.backend != AUTO), self.default)
        precision = next((choice.precision for choice in asked if choice.precision != AUTO), AUTO)
        return Choice(backend=by.backend, precision=precision, field=by.field)

    def check(self, known: Iterable[str]) -> None:
        """Raises ConfigError for a role that is not in `known`, the roles of a model and their categories."""
        known = sorted(set(known))
        for role in self.per_role:
            if role not in known:
                close = difflib.get_close_matches(role, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                has = ", ".join(known) or "none"
                raise refused(
                    FIELD,
                    f"{flag_of(f'{FIELD}.per_role.{role}')}: the model has no such role; its roles: {has}{hint}",
                    "UNKNOWN_ROLE",
                )


def parse(backend: str | None, config: Mapping[str, Any] | None) -> Roles:
    """Roles of the settings diffusion_attention_backend and diffusion_attention_config. Raises ConfigError, by name."""
    config = dict(config or {})
    _only(config, ("default", "per_role", "schedule"), FIELD)
    default = _choice(config.get("default", {}), f"{FIELD}.default")
    if backend is not None:
        named = canonical(backend)
        if default.backend not in (AUTO, named):
            raise refused(SETTING, f"--diffusion-attention-backend {backend} and {FIELD}.default.backend differ")
        default = dataclasses.replace(default, backend=named, field=SETTING)
    roles = _flat(config.get("per_role", {}), f"{FIELD}.per_role")
    schedule = config.get("schedule", [])
    if not isinstance(schedule, list | tuple):
        raise _wrong(f"{FIELD}.schedule", schedule, "expected a list of windows")
    return Roles(
        default=default,
        per_role={role: _choice(given, f"{FIELD}.per_role.{role}") for role, given in roles.items()},
        schedule=tuple(_window(given, f"{FIELD}.schedule[{number}]") for number, given in enumerate(schedule)),
    )


def _flat(given: Any, field: str) -> dict[str, Any]:
    """Roles may have dots, which a flag and a nested object both write as levels: {"m": {"a2v": {...}}} is "m.a2v"."""
    found: dict[str, Any] = {}
    for role, inner in _mapping(given, field).items():
        settings = {}
        for key, value in _mapping({"backend": inner} if isinstance(inner, str) else inner, f"{field}.{role}").items():
            if isinstance(value, Mapping):
                found |= {f"{role}.{path}": choice for path, choice in _flat({key: value}, f"{field}.{role}").items()}
            else:
                settings[key] = value
        if settings or not inner:
            found[role] = settings
    return found


def _choice(given: Any, field: str) -> Choice:
    """A bare text is a backend."""
    given = _mapping({"backend": given} if isinstance(given, str) else given, field)
    _only(given, ("backend", "precision"), field)
    return Choice(
        backend=canonical(given.get("backend", AUTO), f"{field}.backend"),
        precision=_precision(given.get("precision", AUTO), f"{field}.precision"),
        field=f"{field}.backend",
    )


def _precision(given: Any, field: str) -> str:
    if given == AUTO or (isinstance(given, str) and given in PRECISIONS):
        return PRECISIONS.get(given, AUTO)
    raise _wrong(field, given, "expected auto, bf16, fp16, fp32, fp8 or int8")


def _window(given: Any, field: str) -> Window:
    given = _mapping(given, field)
    _only(given, ("precision", *RANGES), field)
    if "precision" not in given:
        raise _wrong(field, given, "needs a precision")
    ranges = {name: _range(given[name], f"{field}.{name}") for name in RANGES if name in given}
    return Window(precision=_precision(given["precision"], f"{field}.precision"), **ranges)


def _range(given: Any, field: str) -> tuple[float, float]:
    numbers = [number for number in given if isinstance(number, int | float)] if isinstance(given, list | tuple) else []
    if len(numbers) != 2 or len(given) != 2 or not 0 <= numbers[0] < numbers[1] <= 1:
        raise _wrong(field, given, "expected [from, to] with 0 <= from < to <= 1")
    return float(numbers[0]), float(numbers[1])


def _mapping(given: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise _wrong(field, given, "expected an object")
    return given


def _only(given: Mapping[str, Any], keys: tuple[str, ...], field: str) -> None:
    for key in given:
        if key not in keys:
            close = difflib.get_close_matches(str(key), keys, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise refused(field, f"{flag_of(field)} has {key!r}, expected {', '.join(keys)}{hint}", "UNKNOWN_SETTING")


def _wrong(field: str, given: Any, rule: str) -> Exception:
    return refused(field, f"{flag_of(field)} is {given!r}: {rule}")
