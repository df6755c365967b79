"""Where settings come from: flags, the environment, a YAML file, the defaults. The first that names one wins, and an
error says which it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from omni_grpc.config import several
from omni_grpc.config.command_line import meant
from omni_grpc.config.flags import SettingsParser
from omni_grpc.config.options import ENVIRONMENT_PREFIX, unknown
from omni_grpc.config.sections import EngineConfig, options
from omni_grpc.config.yaml_text import StrictLoader
from omni_grpc.types.errors import ConfigError, OmniError, Violation
from omni_grpc.types.version import __version__

DEGREES: Mapping[str, str] = {"--usp": "ulysses_degree", "--ring": "ring_degree"}
"""The settings that vLLM-Omni's short flags stand for."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """Settings as their sources have them, and for those that are no flags where that was: a variable, a line."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    models: Sequence[Mapping[str, Any]] = ()
    """The settings of each model, where several are named."""

    def config(self) -> EngineConfig:
        """The whole configuration, of one model. Raises ConfigError for an invalid value, and for several models."""
        if self.models:
            rule = "names several models, which takes a server (python -m omni_grpc.serve); name one"
            raise ConfigError(f"--model {rule}", violations=(Violation("model", rule),))
        return several.configs(self.values, ())[0]

    def configs(self) -> list[EngineConfig]:
        """That of each model. Raises ConfigError for an invalid value."""
        return several.configs(self.values, self.models)

    def told(self, error: OmniError) -> str:
        """What an error says, with where the settings that it is about come from, as far as they are no flags."""
        fields = dict.fromkeys(violation.field for violation in error.violations)
        found = [f"{field} is set by {self.origins[field]}" for field in fields if field in self.origins]
        return f"{error} ({'; '.join(found)})" if found else str(error)


def settings(
    argv: Sequence[str], environ: Mapping[str, str], *, prog: str, description: str, also: Collection[str] = ()
) -> EngineConfig:
    """The configuration for a command line, see `given`. Raises ConfigError for an invalid value too, with where it
    comes from.
    """
    asked = given(argv, environ, prog=prog, description=description, also=also)
    try:
        return asked.config()
    except ConfigError as error:
        raise ConfigError(asked.told(error), reason=error.reason, violations=error.violations) from error


def given(
    argv: Sequence[str], environ: Mapping[str, str], *, prog: str, description: str, also: Collection[str] = ()
) -> Given:
    """The settings of a command line. --help, --version and a flag without its value print and exit. `also`: flags that
    the program takes besides, which a misspelled one may stand for.

    Raises ConfigError for an unknown flag, variable or key.
    """
    parser = _parser(prog, description)
    known, rest = parser.parse_known_args(argv)
    if rest:
        said = parser.unknown(rest[0], also)
        hint = "" if "did you mean" in said else "; --help lists the flags"
        raise ConfigError(said + hint, reason="UNKNOWN_SETTING")
    flags = vars(known)
    _answer_aliases(flags)
    file = flags.pop("config", None)
    in_file, models = ({}, []) if file is None else _in_file(Path(file))
    variables = from_environment(environ)
    named = flags.pop("model", variables.get("model"))
    if named is not None and models:
        raise ConfigError(f"--model names a model, and so does `models:` of {file}; leave one of them out")
    if isinstance(named, tuple):
        models = [several.named(one) for one in named]
    elif named is not None:
        flags |= several.named(named)
    origins = {name: where for name, (_, where) in in_file.items()}
    origins |= {name: _variable(key) for key, name in _variables(environ).items()}
    return Given(
        {name: value for name, (value, _) in in_file.items()} | variables | flags,
        {name: where for name, where in origins.items() if name not in flags},
        models,
    )


def from_mapping(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Flat settings from a mapping as a YAML file gives it: flat names, or sections that hold them."""
    return {name: value for name, (value, _) in _flat(content, lambda path: "").items()}


def _flat(content: Mapping[Any, Any], where: Callable[[tuple[Any, ...]], str]) -> dict[str, tuple[Any, str]]:
    """Each setting of a mapping with its value, and where it is: what `where` says of its path of keys."""
    known = {option.name: option for option in options()}
    sections = {option.section for option in known.values()}
    flat: dict[str, tuple[Any, str]] = {}
    for path, value in _paths(content, sections):
        at, name = where(path), _name(path[-1])
        place = f"{at}: " if at else ""
        section = _name(path[0]) if len(path) > 1 else None
        if name not in known:
            mine = [option.name for option in known.values() if section in (None, option.section)]
            names = (mine, known, sections if section is None and isinstance(value, Mapping) else ())
            close = next(filter(None, (meant(name, some) for some in names)), "")
            raise unknown({name: f"{place}unknown setting {name!r}{close}"})
        if section not in (None, known[name].section):
            raise ConfigError(f"{place}{name!r} belongs to section {known[name].section!r}, not {section!r}")
        if name in flat:
            raise ConfigError(f"{place}{name!r} is set twice: at the top level and under its section")
        flat[name] = value, at
    return flat


def _paths(content: Mapping[Any, Any], sections: Collection[str]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The keys that lead to each setting, and its value."""
    for key, value in content.items():
        if _name(key) in sections and isinstance(value, Mapping):
            yield from (((key, inner), setting) for inner, setting in value.items())
        else:
            yield (key,), value


def _name(key: Any) -> str:
    return str(key).replace("-", "_")


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Flat settings from variables named OMNI_GRPC_<SETTING>. An unknown one is an error, since a typo would be silent.

    Those in OF_THE_BUILD and OF_THE_CLIENT steer something other than the server, and are passed over.
    Our own name of a setting wins over vLLM-Omni's.
    """
    names = _variables(environ)
    known = {option.name: option.environment for option in options()}
    faults = {
        name: f"{_variable(key)}: unknown setting {name!r}{meant(key.upper(), known.values(), quoted=False)}"
        for key, name in names.items()
        if name not in known
    }
    if faults:
        raise unknown(faults)
    return {name: environ[key] for key, name in names.items()}  # ours come last


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are settings, or would be, and which."""
    names = {key: name for key, name in ENVIRONMENT_ALIASES.items() if key in environ}
    return names | {
        key: key.removeprefix(ENVIRONMENT_PREFIX).lower()
        for key in environ
        if key.startswith(ENVIRONMENT_PREFIX) and key not in OF_THE_BUILD | OF_THE_CLIENT
    }


def _variable(key: str) -> str:
    return f"the environment variable {key}"


def _parser(prog: str, description: str) -> SettingsParser:
    parser = SettingsParser(
        prog=prog,
        description=description,
        epilog="Each flag is also an environment variable (OMNI_GRPC_MAX_QUEUE) and a YAML key (max_queue).",
        argument_default=argparse.SUPPRESS,
        others=True,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with settings, at the top level or under their sections"
    )
    aliases = parser.add_argument_group("vLLM-Omni aliases (flags only)")
    for flag, answer in ALWAYS.items():
        aliases.add_argument(flag, dest=flag, action="store_const", const=True, help=answer)
    for flag, name in DEGREES.items():
        aliases.add_argument(flag, dest=name, action=_Alias, metavar="N", help=f"the same as {_flag(name)}")
    groups: dict[str, Any] = {}
    for option in options():
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.section)
        parser.add_setting(option, groups[option.section])
    return parser


class _Alias(argparse.Action):
    """Sets what the flag stands for, and keeps that it was used."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, str(flag), True)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _answer_aliases(flags: dict[str, Any]) -> None:
    """Takes vLLM-Omni's names out of the flags, and says on stderr what each is here, once."""
    for flag, answer in ALWAYS.items():
        if flags.pop(flag, False):
            print(f"{flag}: {answer}", file=sys.stderr)
    for flag, name in DEGREES.items():
        if flags.pop(flag, False):
            print(f"{flag}: this flag is called {_flag(name)} here", file=sys.stderr)


# --- YAML -------------------------------------------------------------------------------------------------------------


def _in_file(path: Path) -> tuple[dict[str, tuple[Any, str]], list[dict[str, Any]]]:
    """The settings of a YAML file with their values, and the file and line of each; and those of each of its models."""
    try:
        text = path.read_text(encoding="utf-8")
        content, lines = yaml.load(text, StrictLoader), _lines(yaml.compose(text, StrictLoader))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {path} must contain settings as `name: value`")

    def where(keys: tuple[Any, ...]) -> str:
        # a key that another mapping lends (`<<`) has no line of its own here
        line = lines.get(tuple(str(key) for key in keys))
        return str(path) if line is None else f"{path}, line {line}"

    models = _models(content.pop("models", []), str(path))
    return _flat(content, where), models


def _models(entries: Any, path: str) -> list[dict[str, Any]]:
    """The settings of each entry of `models:`, where `name` is the name of the model in requests."""
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"{path}: models: expected a list, and in each entry `name:`, `model:` and other settings")
    found = []
    for number, entry in enumerate(entries):
        at = f"{path}: models[{number}]"
        own = {name: value for name, (value, _) in _flat(_renamed(entry), lambda keys, at=at: at).items()}  # type: ignore[misc]
        if "model" not in own:
            raise ConfigError(f"{at}: has no `model:`, the folder or hub name of its checkpoint")
        found.append(own)
    return found


def _renamed(entry: Mapping[Any, Any]) -> dict[Any, Any]:
    return {"served_model_name" if key == "name" else key: value for key, value in entry.items()}


def _lines(node: yaml.Node | None, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    """The line of each key of a mapping and of the mappings right in it, by the keys that lead to it."""
    if not isinstance(node, yaml.MappingNode) or len(above) > 1:
        return {}
    found: dict[tuple[str, ...], int] = {}
    for key, value in node.value:
        path = (*above, str(key.value))
        found |= {path: key.start_mark.line + 1, **_lines(value, path)}
    return found
