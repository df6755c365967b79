"""A worker inside a Ray actor: what runs on the node where a replica was placed.

Nothing here imports ray, and torch comes with the worker: the process that calls these methods imports this file too.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pkgutil
import platform
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from omni_grpc.checkpoint.registry import on_hub, open_model
from omni_grpc.config import EngineConfig
from omni_grpc.config.sections import BUNDLED
from omni_grpc.engine.executor import LOCAL_WORKER, WORKER_ENVIRONMENT
from omni_grpc.engine.fetch_process import open_told
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.errors import CheckpointError, Code, Failure, OmniError
from omni_grpc.types.library_logs import quiet_libraries
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import Died, Fetched, Order, Plan, Report
from omni_grpc.types.shared_memory import NO_BLOCKS
from omni_grpc.types.spec import Checkpoint
from omni_grpc.types.version import __version__

logger = logging.getLogger(__name__)

KEPT = (
    *("model", "adapter", "cache", "quantization", "loras", "offload", "profiler"),
    *("scheduler", "limits", "worker", "outbound"),
)
"""Sections that a worker reads. The others, with addresses of databases and names of secrets, stay with the server."""
BUNDLED_MODEL = "bundled"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a worker is to be. `model` is a folder as the server names it, a name of the hub, or BUNDLED_MODEL, which
    every installation has in a place of its own. `folder`: what relative paths are relative to.
    """

    config: EngineConfig
    model: str
    folder: str
    worker: str = LOCAL_WORKER

    @classmethod
    def of(cls, config: EngineConfig, *, device: str, worker: str = LOCAL_WORKER) -> Assignment:
        """That of a server with this configuration, on this kind of device."""
        kept = {name: getattr(config, name) for name in KEPT}
        kept["model"] = dataclasses.replace(config.model, device=device)
        name = BUNDLED_MODEL if config.model.model == str(BUNDLED) else config.model.model
        return cls(config=EngineConfig(**kept), model=name, folder=str(Path.cwd()), worker=worker)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Where a worker is, and of which version."""

    node: str
    pid: int
    version: str = __version__


class Inner(Protocol):
    """A worker as it is inside the actor."""

    def start(self) -> None: ...

    def submit(self, plan: Plan) -> None: ...

    def order(self, order: Order) -> None: ...

    def close(self) -> None: ...


Make = Callable[[EngineConfig, Checkpoint, Callable[[Report], None], str], Inner]


class RayWorker:
    """One worker of one replica. Its caller has at most one call of `feed` and one of `reports` under way, so that
    plans and reports keep their order.

    It is made without arguments: Ray keeps those of a constructor in the GCS of its cluster, those of other methods go
    straight to this process.
    """

    def __init__(self) -> None:
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._worker: Inner | None = None

    def start(self, assignment: Assignment) -> Arrival:
        """Begins to load, and returns before anything slow is imported."""
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s worker: %(message)s")
        quiet_libraries()
        for name, value in WORKER_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if Path(assignment.folder).is_dir():
            os.chdir(assignment.folder)
        threading.Thread(target=self._load, args=(assignment,), name="omni_grpc-load", daemon=True).start()
        return Arrival(node=platform.node(), pid=os.getpid())

    def reports(self, patience: float) -> list[Report]:
        """The reports that wait, in order; after `patience` seconds without any, none. An answer is a sign of life."""
        try:
            found = [self._reports.get(timeout=patience)]
        except queue.Empty:
            return []
        while not self._reports.empty():
            found.append(self._reports.get())
        return found

    def feed(self, message: Plan | Order) -> None:
        """Hands a plan or an order to the worker, which has said Ready."""
        assert self._worker is not None
        if isinstance(message, Plan):
            self._worker.submit(message)
        else:
            self._worker.order(message)

    def close(self) -> None:
        """Returns when running work has ended."""
        if self._worker is not None:
            self._worker.close()

    def _load(self, assignment: Assignment) -> None:
        """Body of a thread: it ends with a worker that loads its model, or with Died."""
        try:
            config, checkpoint = self._open(assignment)
            make: Make = pkgutil.resolve_name(assignment.worker)
            # the engine may be on another machine, so outputs go inside their reports
            worker = make(config, checkpoint, self._reports.put, NO_BLOCKS)
            self._worker = worker
            worker.start()
        except OmniError as error:
            self._reports.put(Died(failure=error.failure))
        except Exception as error:
            logger.exception("the worker cannot be started")
            message = f"the worker on node {platform.node()} cannot be started: {type(error).__name__}: {plain(error)}"
            self._reports.put(Died(failure=Failure(code=Code.INTERNAL, reason="WORKER_ERROR", message=message)))

    def _open(self, assignment: Assignment) -> tuple[EngineConfig, Checkpoint]:
        """The settings and the checkpoint as they are on this node."""
        model = str(BUNDLED) if assignment.model == BUNDLED_MODEL else assignment.model
        config = assignment.config
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, model=model))
        if on_hub(config.model):
            checkpoint = open_told(config, self._reports.put)
            self._reports.put(Fetched(checkpoint=checkpoint))
            self._reports.put(Loading())
            return config, checkpoint
        if not Path(model).is_dir():
            raise CheckpointError(
                f"node {platform.node()} has no folder {Path(model).absolute()}: a worker of Ray loads its checkpoint "
                "from the same path as the server; share the folder or copy it there, or serve a model of the hub",
                reason="CHECKPOINT_NOT_ON_NODE",
            )
        return config, open_model(config.model, apply=lambda found: apply_settings(config, found))
