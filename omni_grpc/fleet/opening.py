"""From the name of a model, and settings for it, to its checkpoint: which names an operator lets callers load."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from omni_grpc.checkpoint.registry import HUB_ID, name_of, on_hub, open_model, unfetched
from omni_grpc.config import EngineConfig, Option, options, unknown_settings
from omni_grpc.config.fleet import is_of_model
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.errors import InvalidArgument, NotFound, PermissionDenied, Violation
from omni_grpc.types.spec import Checkpoint

FILES = ("lora", "presets", "recipe", "gguf_model")
"""Settings of a model that name files: those of callers have to be under the roots."""
AT_START = ("diffusers_load_kwargs", "served_model_name", "load_later")
"""Settings of a model that callers may not give: the first can name code."""


class Opening:
    """What LoadModel may name: the models that the server was started with, the folders under `--model-roots`, and with
    `--load-from-hub` any model of the hub.
    """

    def __init__(self, config: EngineConfig, listed: Collection[EngineConfig]) -> None:
        self._shared = {option.name: option.of(config) for option in options() if not is_of_model(option)}
        self._listed = {name_of(one.model): one for one in listed}
        self._roots = [Path(root).resolve() for root in config.fleet.model_roots]
        self._from_hub = config.fleet.load_from_hub

    def open(self, name: str, asked: Mapping[str, Any]) -> tuple[EngineConfig, Checkpoint]:
        """The settings of a model, and its checkpoint. Raises NotFound, InvalidArgument and PermissionDenied for what
        is asked, ConfigError and CheckpointError for what does not work.
        """
        config = self._config(name, asked)
        return config, opened(config)

    def _config(self, name: str, asked: Mapping[str, Any]) -> EngineConfig:
        own = self._checked(asked)
        listed = self._listed.get(name)
        if listed is not None:
            before = {option.name: option.of(listed) for option in options() if is_of_model(option)}
            where = self._place(str(own.pop("model"))) if "model" in own else str(before["model"])
            return _config(self._shared, before | own, where, name)
        return _config(self._shared, own, self._place(str(own.pop("model", name))), name)

    def _checked(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        known: dict[str, Option] = {option.name: option for option in options()}
        if unknown := [name for name in asked if name not in known]:
            raise unknown_settings(unknown, known)
        for name in asked:
            if name in AT_START or not is_of_model(known[name]):
                why = "can only be set when the server is started"
                raise InvalidArgument(
                    f"engine_options.{name} {why}", violations=(Violation(f"engine_options.{name}", why),)
                )
        for name in FILES:
            for file in _files(known[name].parse(asked[name])) if asked.get(name) is not None else ():
                self._within(file, f"engine_options.{name}")
        if asked.get("recipe") and "=" not in str(asked["recipe"]) and not self._from_hub:
            why = "names no files (NAME=FILE), and this server loads none from the hub (--load-from-hub)"
            raise PermissionDenied(
                f"engine_options.recipe {why}",
                reason="HUB_NOT_ALLOWED",
                violations=(Violation("engine_options.recipe", why),),
            )
        return dict(asked)

    def _place(self, name: str) -> str:
        """The folder or hub name that a name stands for."""
        for root in self._roots:
            folder = root / name
            if name not in ("", ".", "..") and "/" not in name and folder.is_dir():
                return str(self._within(str(folder), "model"))
        if HUB_ID.fullmatch(name):
            if self._from_hub:
                return name
            message = f"model {name!r} is on the hub, and this server loads none from there (--load-from-hub)"
            raise PermissionDenied(message, reason="HUB_NOT_ALLOWED")
        if "/" in name or "\\" in name:
            return str(self._within(name, "model"))
        known = sorted({*self._listed, *self._folders()})
        message = f"model {name!r} is not known here; this server can load {', '.join(known) or 'no other models'}"
        raise NotFound(message, reason="MODEL_NOT_FOUND", metadata={"name": name})

    def _folders(self) -> Iterable[str]:
        for root in self._roots:
            if root.is_dir():
                yield from (
                    folder.name
                    for folder in root.iterdir()
                    if (folder / "model_index.json").is_file() and self._is_within(folder.resolve())
                )

    def _is_within(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self._roots)

    def _within(self, path: str, field: str) -> Path:
        """A path under the roots, with its links followed. Raises PermissionDenied for any other, there or not."""
        found = Path(path).resolve()
        if not self._is_within(found):
            why = "is outside of the folders that this server loads models from (--model-roots)"
            raise PermissionDenied(f"{field} {why}", reason="PATH_NOT_ALLOWED", violations=(Violation(field, why),))
        return found


def _config(shared: Mapping[str, Any], own: Mapping[str, Any], where: str, name: str) -> EngineConfig:
    return EngineConfig.from_settings(**{**shared, **own, "model": where, "served_model_name": name})


def opened(config: EngineConfig) -> Checkpoint:
    """The checkpoint of a configuration; of a model of the hub, which its worker fetches, the name alone."""
    if on_hub(config.model):
        return unfetched(config.model)
    return open_model(config.model, apply=lambda found: apply_settings(config, found))


def _files(value: Any) -> list[str]:
    """The files of a setting: of pairs their values; those of a recipe follow its name, and a GGUF file may have its
    component in front.
    """
    if isinstance(value, str):
        return [file for file in value.partition("=")[2].split(",") if file]
    if isinstance(value, Mapping):
        return [str(file) for file in value.values()]
    return [str(file).partition("=")[2] or str(file) for file in value]
