"""A worker that is several processes, the ranks of one model. All of them get the same messages in the same order; rank
0 talks to the engine, and the others have to agree with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from omni_grpc.config import EngineConfig
from omni_grpc.engine.agreement import (
    LAST_WORDS_SECONDS,
    Agreement,
    is_last_words,
    is_lost_adapter,
    is_lost_decode,
    name_of,
    of_rank,
)
from omni_grpc.engine.executor import WORKER, Deliver, Life, Obituary, ProcessExecutor, Vital, WorkerProcess, gone
from omni_grpc.types.errors import Code, Failure, Unavailable
from omni_grpc.types.plan import Broken, Died, Order, Plan, Prepared, Report, UnloadAdapter
from omni_grpc.types.ranks import INTERFACES, RANK, RENDEZVOUS, WORLD_SIZE
from omni_grpc.types.request import Request
from omni_grpc.types.shared_inputs import free_blocks, link_inputs, media_of
from omni_grpc.types.spec import Checkpoint
from omni_grpc.types.vitals import Vitals

logger = logging.getLogger(__name__)


class RankLife(Life, Protocol):
    """One life of one rank. Methods are those of WorkerProcess."""

    @property
    def prefix(self) -> str: ...

    def end(self) -> None: ...

    def abandon(self) -> None: ...


Start = Callable[[Deliver], RankLife]
"""Starts a rank, which delivers what it reports. Raises OSError or RuntimeError."""


class RankExecutor(ProcessExecutor):
    """A worker of as many processes as the sizes of the configuration make up. `environments`: variables of each."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        environments: Sequence[Mapping[str, str]],
        *,
        worker: str = WORKER,
    ) -> None:
        super().__init__(config, checkpoint, worker=worker)
        self._group = (worker, config, checkpoint, environments)

    def _begin(self, deliver: Deliver) -> RankGroup:
        worker, config, checkpoint, environments = self._group
        world, folder = len(environments), Path(tempfile.mkdtemp(prefix="omni-ranks-"))

        def start(rank: int, deliver: Deliver) -> WorkerProcess:
            environment = {**_meeting(rank, world, folder), **environments[rank]}
            return WorkerProcess(worker, config, checkpoint, environment, deliver, obituary_of(rank, world))

        starts = [functools.partial(start, rank) for rank in range(world)]
        return RankGroup(config, starts, deliver, forget=functools.partial(shutil.rmtree, folder, ignore_errors=True))


class RankGroup:
    """One life of a group of ranks, as WorkerProcess is that of one process. The end of any rank is the end of all. The
    first death that was found is told, or else what a rank said first of its own end.

    `forget` is called when all of them are gone.
    """

    def __init__(
        self,
        config: EngineConfig,
        starts: Sequence[Start],
        deliver: Deliver,
        *,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises OSError or RuntimeError where a process cannot be started; none is left then."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._forget = forget
        self._world = len(starts)
        self._closing = False
        self._failure: Failure | None = None
        self._last_words: Failure | None = None
        self._gone: set[int] = set()
        self._links: dict[str, list[str]] = {}
        self._numbers = itertools.count()
        self._processes: list[RankLife] = []
        self._agreement = Agreement(
            self._world,
            decoding=config.parallel.vae_patch_parallel_size,
            timeout=config.ranks.rank_timeout,
            later=self._loop.call_later,
            agreed=self._on_agreed,
            # one that has said why it ends is late after that with all that the others do
            end=lambda failure: self._end(self._last_words or failure),
        )
        try:
            for rank, start in enumerate(starts):
                self._processes.append(start(functools.partial(self._on_report, rank)))
        except (OSError, RuntimeError):
            self._closing = True
            self._end_all()
            self._forget()
            raise

    @property
    def pid(self) -> int | None:
        """Process id of rank 0."""
        return self._processes[0].pid

    @property
    def pids(self) -> list[int | None]:
        """That of each rank."""
        return [process.pid for process in self._processes]

    def all_vitals(self) -> Mapping[int, Vitals]:
        """Of each rank on this machine."""
        told = {rank: one.all_vitals() for rank, one in enumerate(self._processes) if isinstance(one, Vital)}
        return {rank: vitals for rank, of_one in told.items() for vitals in of_one.values()}

    def send(self, message: Plan | Order) -> None:
        """To every rank. Raises Unavailable where one is gone: its end is that of all."""
        if self._failure is not None:
            raise gone()
        if isinstance(message, Plan) and message.admit:
            message = dataclasses.replace(message, admit=tuple(map(self._with_links, message.admit)))
        for process in self._processes:
            process.send(message)

    def _with_links(self, request: Request) -> Request:
        """The request with names of its own for its inputs. The engine frees the inputs of a request that is cancelled,
        and some ranks have read them by then and others have not.
        """
        names = [medium.block for medium in media_of(request.inputs) if medium.block]
        if not names:
            return request
        inputs = link_inputs(request.inputs, f"{self._processes[0].prefix}in-{next(self._numbers)}")
        self._links[request.id] = [medium.block for medium in media_of(inputs) if medium.block]
        return dataclasses.replace(request, inputs=inputs)

    def kill(self) -> None:
        """Kills ranks that hang, in a collective for example."""
        message = f"the {self._world} ranks of the model stopped responding and were killed"
        self._end(Failure(code=Code.UNAVAILABLE, reason="WORKER_HUNG", message=message))

    def close(self) -> None:
        """Asks rank 0 to end, which ends what it is at; then nobody needs the others."""
        self._closing = True
        first, *others = self._processes
        first.close()
        for process in others:
            process.abandon()
        self._forget()

    def _on_report(self, rank: int, report: Report) -> None:
        if isinstance(report, Died):
            self._bury(rank, report.failure)
        elif self._closing or self._failure is not None:
            # of what a group leaves behind, the blocks are freed with its processes
            logger.debug("rank %d has reported after the end of its group", rank)
        else:
            self._agreement.hear(rank, report)

    def _on_agreed(self, report: Report) -> None:
        if isinstance(report, Prepared | Broken):
            free_blocks(self._links.pop(report.id, ()))
        if is_lost_decode(report):
            with contextlib.suppress(Unavailable):  # one of them is gone, and Died follows
                self.send(Plan(drop=(report.id,)))
        if is_lost_adapter(report):
            with contextlib.suppress(Unavailable):
                self.send(UnloadAdapter(uid=report.uid))
        self._deliver(report)

    def _end(self, failure: Failure) -> None:
        """Kills all ranks. The first failure that gets here is told: what the others die of follows from it."""
        if self._failure is None and not self._closing:
            self._failure = failure
            self._end_all()

    def _end_all(self) -> None:
        for process in self._processes:
            process.end()
        self._agreement.close()

    def _bury(self, rank: int, failure: Failure) -> None:
        self._gone.add(rank)
        if self._closing:
            return
        told = of_rank(rank, self._world, failure)
        if not is_last_words(failure):
            self._end(told)
        elif self._last_words is None:
            self._last_words = told
            self._loop.call_later(LAST_WORDS_SECONDS, self._end, told)
        if len(self._gone) == self._world:
            if self._failure is None and self._last_words is not None:
                self._end(self._last_words)
            assert self._failure is not None
            # all devices are free now, so that a new group can be started
            self._forget()
            self._deliver(Died(failure=self._failure))


def obituary_of(rank: int, world: int) -> Obituary:
    """How the death of a rank is told."""
    return Obituary(f"{name_of(rank, world)}, process", "see its log")


def _meeting(rank: int, world: int, folder: Path) -> Mapping[str, str]:
    """The variables by which ranks find each other: through a file, so that no port has to be free."""
    # of Linux; elsewhere the interface has another name
    interfaces = {name: os.environ.get(name, "lo") for name in INTERFACES} if sys.platform == "linux" else {}
    return {RANK: str(rank), WORLD_SIZE: str(world), RENDEZVOUS: str(folder / "rendezvous"), **interfaces}
