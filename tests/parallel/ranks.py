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

ONE, PAIR, ALL = 1, 2, 3
"""Sizes of the groups: the first process by itself, the first two, or every one of three."""

HANG = 120
"""Seconds after which a collective, or a job, is stuck."""


class Ranks:
    """Use it as a context. A job that failed on one rank leaves the others in a collective: it is the last one."""

    def __init__(self, folder: Path, backend: str = "gloo", count: int = ALL) -> None:
        """With "nccl" each of the `count` processes has a GPU."""
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(count)]
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

    def run(self, job: Callable[..., Any], *arguments: Any, size: int = PAIR) -> list[Any]:
        """`job(group, *arguments)` on each rank of the group -> what each returned. A job is a module's function."""
        pending = self._pipes[:size]
        for pipe in pending:
            pipe.send_bytes(pickle.dumps((job, arguments, size)))
        results: dict[Connection, Any] = {}
        while len(results) < size:
            ready = wait([pipe for pipe in pending if pipe not in results], HANG)
            assert ready, f"{job.__name__} hangs on {size - len(results)} ranks"
            for pipe in ready:
                failure, results[pipe] = pickle.loads(pipe.recv_bytes())
                assert not failure, f"{job.__name__} on rank {pending.index(pipe)}: {failure}"
        return [results[pipe] for pipe in pending]


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
    alone = [dist.new_group([each]) for each in range(count)]
    groups = {ONE: alone[rank], PAIR: dist.new_group(range(PAIR)), count: dist.group.WORLD}
    while True:
        job, arguments, size = pickle.loads(pipe.recv_bytes())
        try:
            answer = "", job(groups[size], *arguments)
        except Exception:  # noqa: BLE001 - whatever it is, the test fails with it
            answer = traceback.format_exc(), None
        pipe.send_bytes(pickle.dumps(answer))
