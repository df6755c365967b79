"""Where settings come from: flags, the environment, a YAML file, the defaults. The first that names one wins."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from omni_grpc.config import (
    ENVIRONMENT_PREFIX,
    EngineConfig,
    Option,
    options,
    unknown_settings,
)
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.json_text import read_json
from omni_grpc.types.version import __version__

DEGREES: Mapping[str, str] = {"--usp": "--ulysses-degree", "--ring": "--ring-degree"}
"""What vLLM-Omni's short flags are called in full."""

SHORT: Mapping[str, str] = {"-dac": "--diffusion-attention-config"}
"""vLLM-Omni's short flags for flags of the same name here."""

ENVIRONMENT_ALIASES: Mapping[str, str] = {"DIFFUSION_ATTENTION_BACKEND": "diffusion_attention_backend"}
"""Variables of vLLM-Omni, and what they set."""

OF_THE_BUILD = frozenset({"OMNI_GRPC_BUILD", "OMNI_GRPC_CUDA_ARCHS"})
"""Environment variables of setup.py."""

OF_THE_CLIENT = frozenset({"OMNI_GRPC_SERVER", "OMNI_GRPC_TOKEN"})
"""Environment variables of the commands that talk to a server, which may be set where one is started too."""

ALWAYS: Mapping[str, str] = {
    "--omni": "always on; not needed",
    "--step-execution": "step execution is always on",
    "--enforce-eager": "nothing is compiled; --cuda-graph-tokens 0 turns CUDA graphs off",
}
"""vLLM-Omni's flags that are not needed here, and the answer to each. Flags alone: no variables or keys."""


def settings(argv: Sequence[str], environ: Mapping[str, str], *, prog: str, description: str) -> EngineConfig:
    """The configuration for a command line. --help, --version and a flag without its value print and exit.

    Raises ConfigError for an unknown flag, variable or key, and for an invalid value.
    """
    parser = _parser(prog, description)
    argv, paths = _dotted(argv)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        raise _unknown_flag(unknown[0])
    flags = vars(known)
    _answer_aliases(flags)
    objects = {option.name: option for option in options() if option.name in paths}
    flags |= {
        name: _merged(option.parse(flags[name]) if name in flags else {}, paths[name])
        for name, option in objects.items()
    }
    file = flags.pop("config", None)
    from_file = {} if file is None else from_mapping(_read_yaml(Path(file)))
    return EngineConfig.from_settings(**(from_file | from_environment(environ) | flags))


def from_mapping(content: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings from a mapping as a YAML file gives it: flat names, or sections that hold them."""
    known = {option.name: option for option in options()}
    sections = {option.section for option in known.values()}
    flat: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in sections and isinstance(value, Mapping):
            inner = from_mapping(value)
            misplaced = [n for n in inner if known[n].section != name]
            if misplaced:
                raise ConfigError(f"{misplaced[0]!r} belongs to section {known[misplaced[0]].section!r}, not {name!r}")
        elif name in known:
            inner = {name: value}
        else:
            raise unknown_settings([name], known)
        if twice := flat.keys() & inner.keys():
            raise ConfigError(f"{min(twice)!r} is set twice: at the top level and under its section")
        flat |= inner
    return flat


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Flat settings from variables named OMNI_GRPC_<SETTING>. An unknown one is an error, since a typo would be silent.

    Those in OF_THE_BUILD and OF_THE_CLIENT steer something other than the server, and are passed over.
    Our own name of a setting wins over vLLM-Omni's.
    """
    names = {key: name for key, name in ENVIRONMENT_ALIASES.items() if key in environ}
    names |= {
        key: key.removeprefix(ENVIRONMENT_PREFIX).lower()
        for key in environ
        if key.startswith(ENVIRONMENT_PREFIX) and key not in OF_THE_BUILD | OF_THE_CLIENT
    }
    known = {option.name: option for option in options()}
    unknown = [name for name in names.values() if name not in known]
    if unknown:
        raise unknown_settings(unknown, known)
    return {name: environ[key] for key, name in names.items()}  # ours come last


def _dotted(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes --SETTING.key.key VALUE out of a command line, for settings that are JSON objects: what is left, and the
    objects. A value that is JSON is taken as that, else as text. Raises ConfigError for one without a value.
    """
    known = {option.flag: option.name for option in options() if option.type is dict and not option.pairs}
    rest: list[str] = []
    found: dict[str, Any] = {}
    words = iter([_in_full(word) for word in argv])
    for word in words:
        flag, equals, value = word.partition("=")
        head, dot, path = flag.partition(".")
        if not dot or head not in known:
            rest.append(word)
            continue
        if not equals and (value := next(words, "")) == "":
            raise ConfigError(f"{flag} needs a value", violations=(Violation(known[head], "needs a value"),))
        *outer, last = path.split(".")
        inner: dict[str, Any] = {last: _json_or_text(value)}
        for key in reversed(outer):
            inner = {key: inner}
        found[known[head]] = _merged(found.get(known[head], {}), inner)
    return rest, found


def _in_full(word: str) -> str:
    for short, flag in SHORT.items():
        if word == short or word.startswith((f"{short}.", f"{short}=")):
            return flag + word.removeprefix(short)
    return word


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


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="Each flag is also an environment variable (OMNI_GRPC_MAX_QUEUE) and a YAML key (max_queue).",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with settings, at the top level or under their sections"
    )
    aliases = parser.add_argument_group("vLLM-Omni aliases (flags only)")
    for flag, answer in ALWAYS.items():
        aliases.add_argument(flag, dest=flag, action="store_const", const=True, help=answer)
    for flag, name in DEGREES.items():
        aliases.add_argument(flag, name, dest=name, action=_Degree, metavar="N", help="not yet served above 1")
    groups: dict[str, Any] = {}
    for option in options():
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.section)
        _add_flag(groups[option.section], option)
    return parser


def _add_flag(group: Any, option: Option) -> None:
    if option.pairs:
        group.add_argument(option.flag, dest=option.name, action="append", metavar=_metavar(option), help=_help(option))
        return
    if option.type is not bool:
        group.add_argument(option.flag, dest=option.name, metavar=_metavar(option), help=_help(option))
        return
    group.add_argument(option.flag, dest=option.name, nargs="?", const=True, metavar="true|false", help=_help(option))
    off = "--no-" + option.flag.removeprefix("--")
    group.add_argument(off, dest=option.name, action="store_const", const=False, help=argparse.SUPPRESS)


def _metavar(option: Option) -> str:
    if option.type is dict:
        return "NAME=VALUE" if option.pairs else "JSON"
    return "|".join(option.choices) or option.name.rpartition("_")[2].upper()


def _help(option: Option) -> str:
    nothing = option.default is None or option.default is False or option.default == ()
    default = "" if nothing else f" (default: {option.default})"
    return (option.help + default).replace("%", "%%")


class _Degree(argparse.Action):
    """Keeps the flag as it was written beside its value."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        setattr(namespace, self.dest, (flag, values))


def _answer_aliases(flags: dict[str, Any]) -> None:
    """Takes vLLM-Omni's names out of the flags, and says on stderr what each is here, once. Raises ConfigError for a
    degree above 1.
    """
    for flag, answer in ALWAYS.items():
        if flags.pop(flag, False):
            print(f"{flag}: {answer}", file=sys.stderr)
    for name in DEGREES.values():
        flag, degree = flags.pop(name, (name, "1"))
        if flag != name:
            print(f"{flag}: this flag is called {name} here", file=sys.stderr)
        if degree != "1":
            rule = "must be 1: several ranks are not yet supported from the command line (docs/parallel.md)"
            field = name.removeprefix("--").replace("-", "_")
            raise ConfigError(
                f"{flag} is {degree!r}: {rule}", reason="NOT_SUPPORTED", violations=(Violation(field, rule),)
            )


def _unknown_flag(argument: str) -> ConfigError:
    flag = argument.partition("=")[0]
    close = difflib.get_close_matches(flag, [option.flag for option in options()], n=1)
    hint = f"; did you mean {close[0]}?" if close else "; --help lists the flags"
    return ConfigError(f"unknown argument {argument!r}{hint}", reason="UNKNOWN_SETTING")


# --- YAML -------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML libraries silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {path} must contain settings as `name: value`")
    return content
