"""Ranks in actors: those of the tests of their executor, without torch, and real ones that can be paused."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Any

from omni_grpc.engine import ray_driver
from omni_grpc.worker.worker import Worker
from tests.engine import toy_ranks
from tests.ranks.paused import pause

TOY = "tests.ray.rank_workers:serve_toy"
PAUSED = "tests.ray.rank_workers:serve_paused"


def serve_toy(*arguments: Any) -> None:
    """Body of the driver."""
    ray_driver.serve(*arguments, worker="tests.ray.rank_workers:Toy")


def serve_paused(*arguments: Any) -> None:
    """Body of the driver."""
    ray_driver.serve(*arguments, worker="tests.ray.rank_workers:Paused")


class Toy:
    """A rank of tests/engine/toy_ranks.py, and what stands for its pipe."""

    def __init__(self, config, checkpoint, send, prefix) -> None:
        self.send = send
        self._messages: queue.SimpleQueue = queue.SimpleQueue()
        self.recv = self._messages.get
        self.order = self.submit = self._messages.put
        self._body = threading.Thread(target=toy_ranks.serve, args=(self, config, checkpoint, prefix), daemon=True)

    def start(self) -> None:
        self._body.start()

    def close(self) -> None:
        self._messages.put(None)


def pauses(model: Path) -> Path:
    """Where the marks of a model's ranks are: a Ray that runs has not the variables of a test."""
    return Path(f"{model}-pauses")


class Paused(Worker):
    """Leaves the process id of each rank, and its node, beside the marks."""

    def __init__(self, config, checkpoint, send, prefix) -> None:
        import ray

        folder, rank = pauses(checkpoint.path), os.environ["RANK"]
        os.environ["OMNI_TEST_PAUSES"] = str(folder)
        pause()
        super().__init__(config, checkpoint, send, prefix)
        node = ray.get_runtime_context().get_node_id()
        (folder / f"rank-{rank}").write_text(f"{os.getpid()} {node} {os.environ['GLOO_SOCKET_IFNAME']}")
