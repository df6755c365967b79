"""Which models this installation knows: the folders under `models/` and the entry points of other packages."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import logging
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omni_grpc.checkpoint import layout
from omni_grpc.checkpoint import overrides as preferences
from omni_grpc.checkpoint.intact import DAMAGED, check_files, fault
from omni_grpc.config import ModelConfig
from omni_grpc.types.diffusers_spec import nameless_spec, opaque_spec
from omni_grpc.types.errors import CheckpointError, ConfigError, Violation
from omni_grpc.types.json_text import read_json
from omni_grpc.types.os_errors import plain
from omni_grpc.types.spec import Checkpoint, ModelSpec, Preferences

if TYPE_CHECKING:
    from omni_grpc.checkpoint.download_progress import OnTransfer

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "omni_grpc.models"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
T = TypeVar("T")

COUNTS = re.compile(r"num_|layers|blocks|depth|channels|dim|size|heads|mult")
"""Names of settings that say how many or how wide."""
MOST = 1 << 24
CONFIGS = (
    "config.json",
    "scheduler_config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "guider_config.json",
    "mel_config.json",
)
"""What the config of a component may be called; the first that is there counts."""


def _modules() -> Iterator[Any]:
    import omni_grpc.models as package

    for info in pkgutil.iter_modules(package.__path__):
        yield importlib.import_module(f"{package.__name__}.{info.name}")
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        yield entry_point.load()


def family_folders() -> tuple[Path, ...]:
    """The folders of the model families, ours and those of other packages."""
    return tuple(Path(module.__file__).parent for module in _modules() if module.__file__)


@functools.cache
def specs() -> Mapping[str, ModelSpec]:
    """Every known spec by pipeline class name. A name that two packages claim is an error, not a race."""
    found: dict[str, ModelSpec] = {}
    for module in _modules():
        for spec in module.SPECS:
            if spec.name in found:
                family = found[spec.name].family
                raise CheckpointError(
                    f"{module.__name__} registers the pipeline {spec.name!r}, which family {family!r} already has",
                    reason="DUPLICATE_MODEL",
                )
            found[spec.name] = spec
    return found


def on_hub(config: ModelConfig) -> bool:
    """Whether the model is fetched from the hub. A name that is also a local folder means the folder."""
    return HUB_ID.fullmatch(config.model) is not None and not Path(config.model).exists()


def name_of(config: ModelConfig) -> str:
    """What requests call a model: as the settings say, or as its folder or the hub does."""
    return config.served_model_name or (config.model if on_hub(config) else Path(config.model).resolve().name)


def unfetched(config: ModelConfig) -> Checkpoint:
    """A hub model that is not downloaded yet: only its name is known."""
    return Checkpoint(name=name_of(config), path=Path(), spec=nameless_spec(), configs={})


def open_model(
    config: ModelConfig, *, apply: Callable[[Checkpoint], Checkpoint], progress: OnTransfer | None = None
) -> Checkpoint:
    """The checkpoint that the settings name: a folder, or else a model of the hub (`org/name`), which is downloaded.

    `apply` turns the opened checkpoint into the one to return, or raises if it is refused; for a model of the hub it
    also runs before the weights are downloaded. Raises CheckpointError with a reason, see hub.fetch, and ConfigError
    for a revision of a folder.
    """

    def opened(folder: Path) -> Checkpoint:
        return apply(open_checkpoint(folder, name=name_of(config), load_format=config.diffusion_load_format))

    if on_hub(config):
        from omni_grpc.checkpoint import hub  # here, since this leaf needs the standard library alone

        def look(folder: Path) -> frozenset[str]:
            return opened(folder).replaced

        folder = hub.fetch(config.model, revision=config.revision, progress=progress, look=look)
        return _intact(folder, opened(folder))
    folder = Path(config.model)
    if config.revision is not None:
        message = f"--revision is for a hub model (ORG/NAME), but {folder} is a local folder; leave it out"
        raise ConfigError(message, violations=(Violation("revision", message),))
    return _intact(folder, opened(_loadable(folder)))


def _intact(folder: Path, checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint`, whose files are those of `folder`. Raises CheckpointError for one that is damaged."""
    check_files(folder, _index(folder), lambda file: _read_json(folder / file, "shard index"), checkpoint.replaced)
    return checkpoint


def _loadable(folder: Path) -> Path:
    """`folder`, or one with the same files under the names that loaders ask for. Refuses pickled weights."""
    index = _index(folder)
    files = layout.files_of(folder)
    try:
        weights = layout.weights(index, files, str(folder), lambda file: _read_json(folder / file, "shard index"))
    except CheckpointError as error:
        if error.reason == layout.WEIGHTS_MISSING:
            return folder  # loading will name each weight
        raise
    if not any(part.renamed for part in weights):
        return folder
    from omni_grpc.checkpoint import hub

    return hub.with_plain_names(folder, weights)


def _index(folder: Path) -> dict[str, Any]:
    if folder.is_dir() and not (folder / layout.INDEX).is_file():
        names = sorted(path.name for path in folder.iterdir())
        raise CheckpointError(
            f"{folder} is not a checkpoint in the diffusers layout: it has no {layout.INDEX}, only "
            f"{layout.some(names) or 'no files'}",
            reason="NO_MODEL_INDEX",
        )
    return _read_json(folder / layout.INDEX, f"{folder} is not a checkpoint in the diffusers layout")


def open_checkpoint(path: str | Path, *, name: str | None = None, load_format: str = "auto") -> Checkpoint:
    """Reads the configs of a checkpoint in the diffusers layout and finds the spec for its pipeline class.

    Raises CheckpointError where the folder, its model_index.json or a component's config is missing, or no spec
    serves it.
    """
    folder = Path(path)
    index = _index(folder)
    pipeline = str(index.get("_class_name", ""))
    if load_format == "native" and pipeline not in specs():
        raise CheckpointError(
            f"{folder} is a checkpoint of {pipeline!r}, which has no native implementation; "
            f"native pipelines: {', '.join(sorted(specs()))}",
            reason="MODEL_NOT_SUPPORTED",
        )
    configs = _configs(folder, index)
    spec = None if load_format == "diffusers" else specs().get(pipeline)
    try:
        if spec is not None:
            variant = spec.variant
            spec = dataclasses.replace(spec, **_described(folder, pipeline, lambda: variant(configs)))
    except CheckpointError as error:
        if load_format == "native":
            raise
        logger.info("%s runs through diffusers: %s", folder, error)
        spec = None
    checkpoint = Checkpoint(
        name=name or folder.resolve().name,
        path=folder,
        spec=spec or opaque_spec(pipeline),
        configs=configs,
        preferences=_preferences(folder),
    )
    if spec is not None:
        _described(folder, pipeline, lambda: (checkpoint.parts, checkpoint.limits, checkpoint.defaults))
    if checkpoint.described:
        preferences.check(checkpoint, str(folder / layout.PREFERENCES))
    return checkpoint


def _described(folder: Path, pipeline: str, read: Callable[[], T]) -> T:
    """What `read` finds in the configs of a native model. Raises CheckpointError where they lack something, or have
    something else in its place: a spec takes them to be whole.
    """
    try:
        return read()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"the configs in {folder} do not describe a {pipeline}: {type(error).__name__}: {plain(error)}; copy or "
            "download them again"
        ) from error


def _preferences(folder: Path) -> Preferences:
    file = folder / layout.PREFERENCES
    return preferences.read(_read_json(file, "preferences"), str(file)) if file.is_file() else Preferences()


def _configs(folder: Path, index: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    configs: dict[str, Mapping[str, Any]] = {"": index}
    for component, _ in layout.components(index):
        for file in CONFIGS:
            if (folder / component / file).is_file():
                configs[component] = _read_json(folder / component / file, f"component {component!r}")
                _check_counts(configs[component], str(folder / component / file))
                break
        else:
            raise CheckpointError(f"{folder / component} has no config file, but model_index.json names the component")
    return configs


def _check_counts(config: Any, where: str) -> None:
    """Raises CheckpointError for numbers of layers, heads and the like that nothing has: whoever builds the component
    would never come to an end.
    """
    for key, value in config.items():
        counts = value if isinstance(value, list) else [value]
        most = max((count for count in counts if isinstance(count, int)), default=0)
        if most > MOST and COUNTS.search(key):
            raise CheckpointError(f"{where}: {key} is {most}, and no component has more than {MOST}")
        if isinstance(value, dict):
            _check_counts(value, where)


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        content = read_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{what}: {path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{what}: {plain(error)}") from error
    except ValueError as error:
        if why := fault(path):
            raise CheckpointError(f"{what}: {path} {why}", reason=DAMAGED) from error
        raise CheckpointError(f"{what}: {path} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{what}: {path} contains a JSON {type(content).__name__}, expected an object")
    return content
