"""A worker inside a Ray actor: what runs on the node where a replica was placed.

Nothing here imports ray, and torch comes with the worker: the process that calls these methods imports this file too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import pkgutil
import platform
import queue
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from omni_grpc.config import EngineConfig, start_logging
from omni_grpc.engine.assignment import Assignment, opened_here
from omni_grpc.engine.executor import WORKER_ENVIRONMENT
from omni_grpc.engine.rank_network import meeting
from omni_grpc.types.errors import Code, Failure, OmniError
from omni_grpc.types.library_logs import quiet_libraries
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import Died, Order, Plan, Report, UnloadAdapter
from omni_grpc.types.ranks import LISTENER
from omni_grpc.types.shared_memory import NO_BLOCKS
from omni_grpc.types.spec import Checkpoint
from omni_grpc.types.version import __version__

logger = logging.getLogger(__name__)

MEETING = "ranks"
"""Name of the meeting of ranks at their store, which is of no others."""


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
    """One worker of one replica, or one of its ranks. Its caller has at most one call of `feed` and one of `reports`
    under way, so that plans and reports keep their order.

    It is made without arguments: Ray keeps those of a constructor in the GCS of its cluster, those of other methods go
    straight to this process.
    """

    def __init__(self) -> None:
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._worker: Inner | None = None
        self._kept: tempfile.TemporaryDirectory[str] | None = None
        """Files of adapters that the server's machine has, and this one has not."""

    def listen(self, host: str) -> int:
        """Has this process, rank 0 of several, listen where they meet; the port. Raises OSError where `host` is no
        address of this machine.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port: int = listener.getsockname()[1]
        os.environ[LISTENER] = str(listener.detach())
        return port

    def start(self, assignment: Assignment) -> Arrival:
        """Begins to load, and returns before anything slow is imported."""
        start_logging(assignment.config.logs, "worker")
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
            if isinstance(message, UnloadAdapter) and self._kept is not None:
                shutil.rmtree(self._folder(message.uid), ignore_errors=True)

    def has_file(self, path: str, sha256: str) -> bool:
        """Whether this machine has a file of that hash at that path."""
        try:
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == sha256
        except OSError:
            return False

    def keep_file(self, uid: str, name: str, files: Mapping[str, bytes]) -> str:
        """Keeps the file of an adapter, and what belongs beside it, until that is unloaded or this process ends; the
        path of `name`. Raises OSError.
        """
        if self._kept is None:
            self._kept = tempfile.TemporaryDirectory(prefix="omni_grpc-adapters-")
        folder = self._folder(uid)
        folder.mkdir(exist_ok=True)
        for own, data in files.items():
            (folder / own).write_bytes(data)
        return str(folder / name)

    def _folder(self, uid: str) -> Path:
        assert self._kept is not None
        return Path(self._kept.name) / hashlib.sha256(uid.encode()).hexdigest()

    def close(self) -> None:
        """Returns when running work has ended."""
        if self._worker is not None:
            self._worker.close()

    def _load(self, assignment: Assignment) -> None:
        """Body of a thread: it ends with a worker that loads its model, or with Died."""
        try:
            if (seat := assignment.seat) is not None:
                os.environ.update(meeting(seat.rank, seat.world, seat.host, seat.port, MEETING))
            config, checkpoint = opened_here(assignment, self._reports.put)
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
