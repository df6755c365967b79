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
from collections.abc import Mapping, Sequence
from pathlib import Path

from omni_grpc.config import EngineConfig
from omni_grpc.engine.executor import WORKER, Deliver, Obituary, ProcessExecutor, WorkerProcess, gone
from omni_grpc.types.errors import Code, Failure, Unavailable
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.plan import (
    Broken,
    Decoded,
    DecodedPart,
    Died,
    Order,
    Plan,
    Prepared,
    Ready,
    Report,
    Stepped,
)
from omni_grpc.types.ranks import RANK, RENDEZVOUS, WORLD_SIZE
from omni_grpc.types.request import Request
from omni_grpc.types.shared_inputs import free_blocks, link_inputs, media_of
from omni_grpc.types.spec import Checkpoint

logger = logging.getLogger(__name__)

Key = tuple[str, str]
"""What reports belong together: the lane and, where it has one, the request."""
LANES = ("prepare", "step", "decode")

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Which network interface ranks meet on: the loopback one, so that nothing listens for other machines."""


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
        return RankGroup(*self._group, deliver)


@dataclasses.dataclass(slots=True)
class Round:
    """The reports of the ranks on one piece of work, as far as they have come."""

    reports: dict[int, Report] = dataclasses.field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class RankGroup:
    """One life of a group of ranks, as WorkerProcess is that of one process. The end of any rank is the end of all."""

    def __init__(
        self,
        worker: str,
        config: EngineConfig,
        checkpoint: Checkpoint,
        environments: Sequence[Mapping[str, str]],
        deliver: Deliver,
    ) -> None:
        """Raises OSError or RuntimeError where a process cannot be started; none is left then."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._timeout = config.parallel.rank_timeout
        self._world = len(environments)
        self._decoding = config.parallel.vae_patch_parallel_size
        self._closing = False
        self._failure: Failure | None = None
        self._gone: set[int] = set()
        self._rounds: dict[Key, list[Round]] = {}
        self._links: dict[str, list[str]] = {}
        self._numbers = itertools.count()
        self._processes: list[WorkerProcess] = []
        self._folder = Path(tempfile.mkdtemp(prefix="omni-ranks-"))
        try:
            for rank, environment in enumerate(environments):
                self._processes.append(
                    WorkerProcess(
                        worker,
                        config,
                        checkpoint,
                        {**_meeting(rank, self._world, self._folder), **environment},
                        functools.partial(self._on_report, rank),
                        Obituary(f"{self._name(rank)}, process", "see its log"),
                    )
                )
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
        elif isinstance(report, Loading):
            if rank == 0:
                self._deliver(report)
        else:
            self._join(rank, report)

    def _join(self, rank: int, report: Report) -> None:
        """Delivers the report of rank 0 once all ranks have given theirs: from then on none of them reads the inputs of
        a prepared request, for example, and what comes next finds all of them in the same place.
        """
        key = _key(report)
        rounds = self._rounds.setdefault(key, [])
        it = next((one for one in rounds if rank not in one.reports), None)
        if it is None:
            it = Round()
            rounds.append(it)
            if key[0] in LANES:
                it.timer = self._loop.call_later(self._timeout, self._on_lag, key, it)
        it.reports[rank] = report
        if len(it.reports) < (self._decoding if key[0] == "decode" else self._world):
            return
        rounds.remove(it)
        if not rounds:
            del self._rounds[key]
        if it.timer is not None:
            it.timer.cancel()
        self._settle(key, it.reports)

    def _settle(self, key: Key, reports: Mapping[int, Report]) -> None:
        first = reports[0]
        if key[0] == "prepare":
            free_blocks(self._links.pop(key[1], ()))
        other = next((rank for rank, report in reports.items() if _told(report) != _told(first)), None)
        # rank 0 alone encodes what was decoded: where that fails, all ranks are done with the decode, and none hangs
        if other is not None and key[0] != "decode":
            message = (
                f"{self._name(other)} and rank 0 disagree on {_what(key)}: {_said(reports[other])}, and "
                f"{_said(first)}; all ranks were ended"
            )
            self._end(Failure(code=Code.INTERNAL, reason="RANKS_DISAGREE", message=message))
            return
        if isinstance(first, Broken) and key[0] == "decode":
            # the others have it still, and may step it; all of them drop it at the same point
            with contextlib.suppress(Unavailable):  # one of them is gone, and Died follows
                self.send(Plan(drop=(first.id,)))
        self._deliver(first)

    def _on_lag(self, key: Key, it: Round) -> None:
        if self._closing or self._failure is not None:
            return
        late = [rank for rank in range(self._world) if rank not in it.reports]
        done = ", ".join(f"rank {rank}: {_said(report)}" for rank, report in sorted(it.reports.items()))
        message = (
            f"{self._name(late[0])} is {self._timeout:g} s late with {_what(key)} ({done}), see --rank-timeout; "
            "all ranks were ended"
        )
        self._end(Failure(code=Code.UNAVAILABLE, reason="RANK_STUCK", message=message))

    def _end(self, failure: Failure) -> None:
        """Kills all ranks. The first failure is the one that is told: what the others die of follows from it."""
        if self._failure is None:
            self._failure = failure
            self._end_all()

    def _end_all(self) -> None:
        for process in self._processes:
            process.end()
        for it in (one for rounds in self._rounds.values() for one in rounds):
            if it.timer is not None:
                it.timer.cancel()

    def _bury(self, rank: int, failure: Failure) -> None:
        self._gone.add(rank)
        if self._closing:
            return
        if not failure.message.startswith("rank "):
            failure = dataclasses.replace(failure, message=f"{self._name(rank)}: {failure.message}")
        self._end(failure)
        if len(self._gone) == self._world and self._failure is not None:
            # all devices are free now, so that a new group can be started
            self._forget()
            self._deliver(Died(failure=self._failure))

    def _forget(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self._world}"


def _meeting(rank: int, world: int, folder: Path) -> Mapping[str, str]:
    """The variables by which ranks find each other: through a file, so that no port has to be free."""
    # of Linux; elsewhere the interface has another name
    interfaces = {name: os.environ.get(name, "lo") for name in INTERFACES} if sys.platform == "linux" else {}
    return {RANK: str(rank), WORLD_SIZE: str(world), RENDEZVOUS: str(folder / "rendezvous"), **interfaces}


def _key(report: Report) -> Key:
    match report:
        case Prepared(id=request_id):
            return "prepare", request_id
        case Broken(id=request_id, phase=phase):
            return phase, request_id
        case Stepped():
            return "step", ""
        case Decoded(id=request_id) | DecodedPart(id=request_id):
            return "decode", request_id
        case Ready():
            return "load", ""
    return "order", ""


def _told(report: Report) -> tuple[object, ...]:
    """What all ranks have to say alike."""
    match report:
        case Prepared(rows=rows, prompt_tokens=tokens):
            return Prepared, rows, tokens
        case Stepped(progress=progress, broken=broken):
            steps = tuple((one.id, one.step, one.evals, one.part_ready, one.finished) for one in progress)
            return Stepped, steps, tuple(one.id for one in broken)
        case Ready(dtype=dtype):
            return Ready, dtype
    return (type(report),)


def _what(key: Key) -> str:
    kind, request_id = key
    return " of ".join(filter(None, (f"its {kind}", request_id)))


def _said(report: Report) -> str:
    match report:
        case Broken(failure=failure):
            return f"{failure.reason}, {failure.message}"
        case Stepped(progress=progress, broken=broken):
            steps = [f"{one.id} at step {one.step}" for one in progress]
            return f"stepped {', '.join(steps) or 'nothing'}" + "".join(f", {one.id} broken" for one in broken)
    return type(report).__name__
