"""The adapters of a server's recipe, on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from omni_grpc.checkpoint.hub import fetch_file
from omni_grpc.checkpoint.layout import HUB_FILE
from omni_grpc.config import EngineConfig
from omni_grpc.resolve.recipes import with_loras
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.spec import Checkpoint


def with_recipe(config: EngineConfig, checkpoint: Checkpoint, tell: Callable[[Loading], None]) -> EngineConfig:
    """The configuration with the adapters of the recipe among those of `--lora`. One on the hub is downloaded first,
    and `tell` is told so. Raises CheckpointError as hub.fetch_file does.
    """
    if not checkpoint.recipe_loras:
        return config
    files = {}
    for name, file in checkpoint.recipe_loras.items():
        if not Path(file).exists() and (on_hub := HUB_FILE.fullmatch(file)):
            tell(Loading(phase=LoadPhase.DOWNLOADING, component=name, file=on_hub[2]))
            file = str(fetch_file(*on_hub.groups()))
            tell(Loading())
        files[name] = file
    return with_loras(config, files)
