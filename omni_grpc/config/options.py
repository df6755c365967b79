"""How a setting is declared in a section, and seen from outside: its flag, environment variable, type and parser."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omni_grpc.config.command_line import meant
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.json_text import read_json
from omni_grpc.types.os_errors import reason

ENVIRONMENT_PREFIX = "OMNI_GRPC_"

BOOLEANS: Mapping[str, bool] = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
"""How a boolean is written in a flag or a variable, in any case."""


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    read: Callable[[Any], Any] | None = None,
    pairs: bool = False,
    repeats: bool = False,
    empty: str = "leave it out for the default",
) -> Any:
    """A dataclass field with what a flag needs to know. `minimum` and `maximum` are inclusive; `read` gives the value
    in its plain form, or raises ValueError whose text is the rule; `pairs`: an object that is also written NAME=VALUE,
    as often as it takes; `repeats`: its flag may be given several times; `empty`: what to do instead of giving an empty
    text.
    """
    metadata = {
        "help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "read": read, "pairs": pairs,
        "repeats": repeats, "empty": empty,
    }  # fmt: skip
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One setting of the tree, seen from outside. `feature`: its section is None where nothing in it is set."""

    name: str
    section: str
    feature: bool
    type: type
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    read: Callable[[Any], Any] | None
    pairs: bool
    repeats: bool
    empty: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def environment(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    def of(self, config: Any) -> Any:
        """What a configuration has for it: the default where its feature is off."""
        section = getattr(config, self.section)
        return self.default if section is None else getattr(section, self.name)

    def parse(self, value: Any) -> Any:
        """The value as this option's type; strings are read as flags and environment variables give them."""
        if value is None and self.optional:
            return None
        try:
            parsed = self._convert(value)
        except (KeyError, TypeError, ValueError):
            raise self._error(value, f"expected {self._expected}") from None
        if self.type is str and not self.choices and not parsed.strip():
            raise self._error(value, f"must not be empty; {self.empty}")
        if self.choices and parsed not in self.choices:
            raise self._error(value, f"expected one of {', '.join(self.choices)}")
        if self.minimum is not None and self.maximum is not None and not self.minimum <= parsed <= self.maximum:
            raise self._error(value, f"must be from {self.minimum:g} to {self.maximum:g}")
        if self.minimum is not None and not parsed >= self.minimum:
            raise self._error(value, f"must be at least {self.minimum:g}")
        return parsed if self.read is None else self._read(parsed)

    def _read(self, value: Any) -> Any:
        assert self.read is not None
        try:
            return self.read(value)
        except ValueError as error:
            raise self._error(value, str(error)) from None

    @property
    def _expected(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.type is dict:
            return "NAME=VALUE or a JSON object of strings" if self.pairs else "a JSON object, or @FILE with one"
        if self.type is bool:
            return "true or false"
        return "a list of names" if self.type is tuple else self.type.__name__

    def _convert(self, value: Any) -> Any:
        if self.pairs:
            return _pairs(value)
        if self.type is dict:
            parsed = read_json(_text_of(value)) if isinstance(value, str) else value
            if not isinstance(parsed, dict):
                raise TypeError(value)
            return parsed
        if self.type is tuple:
            names = value.split(",") if isinstance(value, str) else value
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise TypeError(value)
            return tuple(name.strip() for name in names if name.strip())
        if self.type is bool:
            if isinstance(value, bool):
                return value
            return BOOLEANS[str(value).lower()]
        if isinstance(value, bool) or (self.type is str and not isinstance(value, str)):
            raise TypeError(value)
        if self.type is int and isinstance(value, float):
            raise TypeError(value)
        return self.type(value)

    def _error(self, value: Any, rule: str) -> ConfigError:
        message = f"{self.flag} is {value!r}: {rule}"
        return ConfigError(message, violations=(Violation(self.name, message),))


def options_of(tree: type) -> Iterator[Option]:
    """Every setting of a tree of sections, in the order in which it is declared."""
    for section, kind, feature in sections_of(tree):
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            hint = hints[field.name]
            inner = (
                [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
                if isinstance(hint, types.UnionType)
                else [hint]
            )
            yield Option(
                name=field.name,
                section=section,
                feature=feature,
                type=typing.get_origin(inner[0]) or inner[0],
                optional=isinstance(hint, types.UnionType),
                default=None if field.default is dataclasses.MISSING else field.default,
                help=field.metadata["help"],
                choices=field.metadata["choices"],
                minimum=field.metadata["minimum"],
                maximum=field.metadata["maximum"],
                read=field.metadata["read"],
                pairs=field.metadata["pairs"],
                repeats=field.metadata["repeats"],
                empty=field.metadata["empty"],
            )


def sections_of(tree: type) -> Iterator[tuple[str, type, bool]]:
    """The sections of a tree: name, class, and whether it is a feature."""
    for section, hint in typing.get_type_hints(tree).items():
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        yield section, kinds[0] if kinds else hint, bool(kinds)


def _pairs(value: Any) -> dict[str, str]:
    """NAME=VALUE, a JSON object, a mapping, or several of these. Raises ValueError for a name that is given twice."""
    if isinstance(value, list | tuple):
        pairs = [pair for part in value for pair in _pairs(part).items()]
    elif isinstance(value, str) and not value.lstrip().startswith("{"):
        name, equals, text = value.partition("=")
        pairs = [(name, text)] if equals and name and text else [("", "")]
    else:
        pairs = list((read_json(value) if isinstance(value, str) else dict(value)).items())
    if len(dict(pairs)) < len(pairs) or not all(isinstance(part, str) and part for pair in pairs for part in pair):
        raise ValueError(value)
    return dict(pairs)


def unknown_settings(names: Iterable[str], known: Mapping[str, Option]) -> ConfigError:
    """For names that are no settings, each with the nearest that is one."""
    return unknown({name: f"unknown setting {name!r}{meant(name, known)}" for name in names})


def unknown(faults: Mapping[str, str]) -> ConfigError:
    """The error for names that are no settings, and what to say of each."""
    return ConfigError(
        "; ".join(faults.values()),
        reason="UNKNOWN_SETTING",
        violations=tuple(Violation(name, fault) for name, fault in faults.items()),
    )


def _text_of(value: str) -> str:
    """The text itself, or that of the file that it names behind @. Raises ValueError where that cannot be read."""
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{value[1:]}: {reason(error)}") from None
