"""Processes that are joined by gloo or NCCL, started once and given one job after the other."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
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

HANG = 120
"""Seconds after which a collective, or a job, is stuck."""


class Ranks:
    """Use it as a context. A job that failed on one rank leaves the others in a collective: it is the last one."""

    def __init__(self, folder: Path, backend: str = "gloo", count: int = COUNT) -> None:
        """With "nccl" each of the `count` processes has a GPU."""
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(count)]
        self._joined: set[ParallelSizes] = set()
        self._pipes = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(backend, rank, count, folder / "rendezvous", theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def run(self, job: Callable[..., Any], *arguments: Any, sizes: ParallelSizes) -> list[Any]:
        """`job(mesh, *arguments)` on each rank of the sizes -> what each returned. A job is a module's function."""
        if sizes not in self._joined:
            self._joined.add(sizes)
            self._ask(self._pipes, _joined, (), sizes)
        return self._ask(self._pipes[: sizes.world], job, arguments, sizes)

    def _ask(
        self, pending: list[Connection], job: Callable[..., Any], arguments: tuple[Any, ...], sizes: ParallelSizes
    ) -> list[Any]:
        size = len(pending)
        for pipe in pending:
            pipe.send_bytes(pickle.dumps((job, arguments, sizes)))
        results: dict[Connection, Any] = {}
        while len(results) < size:
            ready = wait([pipe for pipe in pending if pipe not in results], HANG)
            assert ready, f"{job.__name__} hangs on {size - len(results)} ranks"
            for pipe in ready:
                failure, results[pipe] = pickle.loads(pipe.recv_bytes())
                assert not failure, f"{job.__name__} on rank {pending.index(pipe)}: {failure}"
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
        timeout=datetime.timedelta(seconds=HANG),
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
