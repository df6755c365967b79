"""What a worker on another machine is to be, and how it finds its checkpoint there. Nothing here imports ray or
torch.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable
from pathlib import Path

from omni_grpc.checkpoint.registry import on_hub, open_model
from omni_grpc.config import EngineConfig
from omni_grpc.config.sections import BUNDLED
from omni_grpc.engine.executor import LOCAL_WORKER
from omni_grpc.engine.fetch_process import open_told
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.plan import Fetched, Report
from omni_grpc.types.spec import Checkpoint

KEPT = (
    *("model", "adapter", "cache", "quantization", "loras", "offload", "recipes", "profiler"),
    *("scheduler", "limits", "worker", "parallel", "ranks", "outbound", "logs"),
)
"""Sections that a worker reads. The others, with addresses of databases and names of secrets, stay with the server."""
BUNDLED_MODEL = "bundled"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Which rank of how many a worker is, and at which address of rank 0 they meet."""

    rank: int
    world: int
    host: str
    port: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a worker is to be. `model` is a folder as the server names it, a name of the hub, or BUNDLED_MODEL, which
    every installation has in a place of its own. `folder`: what relative paths are relative to. `seat` is for one that
    is a rank of several.
    """

    config: EngineConfig
    model: str
    folder: str
    worker: str = LOCAL_WORKER
    seat: Seat | None = None

    @classmethod
    def of(cls, config: EngineConfig, *, device: str, worker: str = LOCAL_WORKER) -> Assignment:
        """That of a server with this configuration, on this kind of device."""
        kept = {name: getattr(config, name) for name in KEPT}
        kept["model"] = dataclasses.replace(config.model, device=device)
        name = BUNDLED_MODEL if config.model.model == str(BUNDLED) else config.model.model
        return cls(config=EngineConfig(**kept), model=name, folder=str(Path.cwd()), worker=worker)


def opened_here(assignment: Assignment, tell: Callable[[Report], None]) -> tuple[EngineConfig, Checkpoint]:
    """The settings and the checkpoint as they are on this machine. One of the hub is downloaded first, of which `tell`
    gets the progress, then Fetched. Raises OmniError.
    """
    model = str(BUNDLED) if assignment.model == BUNDLED_MODEL else assignment.model
    config = assignment.config
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, model=model))
    if on_hub(config.model):
        checkpoint = open_told(config, tell)
        tell(Fetched(checkpoint=checkpoint))
        tell(Loading())
        return config, checkpoint
    if not Path(model).is_dir():
        raise CheckpointError(
            f"node {platform.node()} has no folder {Path(model).absolute()}: a worker loads its checkpoint from the "
            "same path as the server; share the folder or copy it there, or serve a model of the hub",
            reason="CHECKPOINT_NOT_ON_NODE",
        )
    return config, open_model(config.model, apply=lambda found: apply_settings(config, found))
