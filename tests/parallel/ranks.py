"""Processes that are joined by gloo or NCCL, started once and given one job after the other."""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from omni_grpc.nn.mesh import Mesh, join
from omni_grpc.types.ranks import ParallelSizes

PAIR, ALL, COUNT = 2, 3, 4
"""Ranks of a pair, of most tests with an odd number, and processes."""

ONE = ParallelSizes()

HANG, START = 120, 600
"""Seconds after which a job is stuck, and a collective, which may wait for ranks that have yet to start."""


GATHERED = 10
"""Seconds that ranks get to answer beside one whose job failed: those in a collective with it never do."""


class Ranks:
    """Use it as a context. Where a job failed on one rank and left others in a collective, all are started anew."""

    def __init__(self, folder: Path, backend: str = "gloo", count: int = COUNT) -> None:
        """With "nccl" each of the `count` processes has a GPU."""
        self._how = folder, backend, count
        self._starts = itertools.count()
        self._joined: set[ParallelSizes] = set()
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def run(self, job: Callable[..., Any], *arguments: Any, sizes: ParallelSizes) -> list[Any]:
        """`job(mesh, *arguments)` on each rank of the sizes -> what each returned. A job is a module's function."""
        if sizes not in self._joined:
            self._joined.add(sizes)
            self._ask(self._pipes, _joined, (), sizes)
        return self._ask(self._pipes[: sizes.world], job, arguments, sizes)

    def _start(self) -> None:
        folder, backend, count = self._how
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(count)]
        rendezvous = folder / f"rendezvous-{next(self._starts)}"
        self._joined.clear()
        self._pipes = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(backend, rank, count, rendezvous, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _ask(
        self, pending: list[Connection], job: Callable[..., Any], arguments: tuple[Any, ...], sizes: ParallelSizes
    ) -> list[Any]:
        for pipe in pending:
            pipe.send_bytes(pickle.dumps((job, arguments, sizes)))
        results: dict[Connection, Any] = {}
        failures: list[str] = []
        while len(results) < len(pending):
            patience = GATHERED if failures else START if job is _joined else HANG
            ready = wait([pipe for pipe in pending if pipe not in results], patience)
            if not ready:
                failures.append(f"{job.__name__} hangs on {len(pending) - len(results)} ranks")
                self._end()
                self._start()
                break
            for pipe in ready:
                failure, results[pipe] = pickle.loads(pipe.recv_bytes())
                if failure:
                    failures.append(f"{job.__name__} on rank {pending.index(pipe)}: {failure}")
        assert not failures, failures[0]
        return [results[pipe] for pipe in pending]


def _joined(mesh: Mesh) -> None:
    """The mesh is made."""


def _serve(backend: str, rank: int, count: int, rendezvous: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=START),
    )
    meshes: dict[ParallelSizes, Mesh] = {}
    while True:
        job, arguments, sizes = pickle.loads(pipe.recv_bytes())
        try:
            if sizes not in meshes:
                # every process has to be there when groups are made, also those that are in none
                meshes[sizes] = join(sizes, range(sizes.world))
            answer = "", job(meshes[sizes], *arguments)
        except Exception:  # noqa: BLE001 - whatever it is, the test fails with it
            answer = traceback.format_exc(), None
        pipe.send_bytes(pickle.dumps(answer))
