"""Settings as flags, the same in every command that takes them: --SETTING VALUE, --BOOLEAN, --OBJECT.key VALUE."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omni_grpc.config.command_line import Parser
from omni_grpc.config.options import BOOLEANS, Option
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.json_text import read_json

SHORT: Mapping[str, str] = {"-dac": "--diffusion-attention-config"}
"""vLLM-Omni's short flags for flags of the same name here."""


class SettingsParser(Parser):
    """A parser whose arguments are settings, among others: those that `add_setting` has added come out as their types.

    Raises ConfigError for a value that is not one of its setting.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._settings: list[Option] = []

    def add_setting(self, option: Option, group: Any) -> None:
        """The flag of a setting. A boolean one is on where it stands alone, and has --no-SETTING beside it."""
        self._settings.append(option)
        more: dict[str, Any] = {"dest": option.name, "metavar": _metavar(option), "help": _help(option)}
        if option.type is bool:
            more |= {"nargs": "?", "const": True, "metavar": "true|false"}
            off = "--no-" + option.flag.removeprefix("--")
            group.add_argument(off, dest=option.name, action="store_const", const=False, help=argparse.SUPPRESS)
        if option.pairs or option.repeats:
            more["action"] = "append"
        group.add_argument(option.flag, **more)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words, paths = _dotted(_in_full(sys.argv[1:] if args is None else args, self._settings), self._settings)
        found, rest = super().parse_known_args(_with_values(words, self._settings), namespace)
        for option in self._settings:
            value: Any = getattr(found, option.name, None)
            if value is not None and option.repeats:
                parsed = tuple(option.parse(one) for one in value)
                value = parsed[0] if len(parsed) == 1 else parsed
            elif value is not None:
                value = option.parse(value)
            if option.name in paths:
                value = _merged(value or {}, paths[option.name])
            if value is not None:
                setattr(found, option.name, value)
        return found, rest


def _metavar(option: Option) -> str:
    if option.type is dict:
        return "NAME=VALUE" if option.pairs else "JSON"
    return "|".join(option.choices) or option.name.rpartition("_")[2].upper()


def _help(option: Option) -> str:
    nothing = option.default is None or option.default is False or option.default == ()
    default = "" if nothing else f" (default: {option.default})"
    return (option.help + default).replace("%", "%%")


def _with_values(words: Sequence[str], known: Iterable[Option]) -> list[str]:
    """The words with the value of each boolean flag in its own word, so that a flag that stands alone does not take the
    next argument, such as a prompt, for its value.
    """
    flags = {option.flag for option in known if option.type is bool}
    rest: list[str] = []
    for at, word in enumerate(words):
        if word == "--":
            return [*rest, *words[at:]]
        if word.lower() in BOOLEANS and rest and rest[-1] in flags:
            rest[-1] += f"={word}"
        else:
            if rest and rest[-1] in flags:
                rest[-1] += "=true"
            rest.append(word)
    if rest and rest[-1] in flags:
        rest[-1] += "=true"
    return rest


def _dotted(words: Sequence[str], known: Iterable[Option]) -> tuple[list[str], dict[str, Any]]:
    """Takes --SETTING.key.key VALUE out of a command line, for settings that are JSON objects: what is left, and the
    objects. A value that is JSON is taken as that, else as text. Raises ConfigError for one without a value.
    """
    objects = {option.flag: option.name for option in known if option.type is dict and not option.pairs}
    rest: list[str] = []
    found: dict[str, Any] = {}
    remaining = iter(words)
    for word in remaining:
        flag, equals, value = word.partition("=")
        head, dot, path = flag.partition(".")
        if word == "--":
            return [*rest, word, *remaining], found
        if not dot or head not in objects:
            rest.append(word)
            continue
        if not equals and (value := next(remaining, "")) == "":
            raise ConfigError(f"{flag} needs a value", violations=(Violation(objects[head], "needs a value"),))
        *outer, last = path.split(".")
        inner: dict[str, Any] = {last: _json_or_text(value)}
        for key in reversed(outer):
            inner = {key: inner}
        found[objects[head]] = _merged(found.get(objects[head], {}), inner)
    return rest, found


def _in_full(words: Sequence[str], known: Iterable[Option]) -> list[str]:
    """The words with the full names of short flags."""
    flags = {option.flag for option in known}
    short = {name: flag for name, flag in SHORT.items() if flag in flags}
    full = []
    for word in words:
        name = next((name for name in short if word == name or word.startswith((f"{name}.", f"{name}="))), "")
        full.append(short[name] + word.removeprefix(name) if name else word)
    return full


def _json_or_text(value: str) -> Any:
    try:
        return read_json(value)
    except ValueError:
        return value


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, level by level; `above` wins."""
    both = {
        key: _merged(below[key], above[key])
        for key in below.keys() & above.keys()
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping)
    }
    return {**below, **above, **both}
