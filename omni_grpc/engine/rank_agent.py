"""What torchrun's processes do that are not rank 0: each keeps a line to the server, and starts and ends its rank, a
worker process, when the server says so. It outlives both its rank and the server, for a while, and connects again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import platform
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_grpc.config import EngineConfig
from omni_grpc.engine.admission import not_started
from omni_grpc.engine.assignment import Assignment, opened_here
from omni_grpc.engine.executor import Deliver, WorkerProcess
from omni_grpc.engine.rank_executor import obituary_of
from omni_grpc.engine.rank_line import Line, greeted
from omni_grpc.engine.rank_link import Begin, Bye, End, Hello
from omni_grpc.engine.rank_network import meeting
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, Failure, OmniError, Unavailable
from omni_grpc.types.launch import Launch
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import (
    Died,
    EndRecording,
    LoadAdapter,
    Order,
    Plan,
    Record,
    Recorded,
    Report,
    Sleep,
    UnloadAdapter,
    Wake,
)
from omni_grpc.types.spec import Checkpoint

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 120.0
"""How long an agent looks for the server: at its start, and after it has lost it."""
RETRY_SECONDS = 0.5
LEAVE_SECONDS = 25.0
"""How long one that is told to end waits for the server to end before it: torchrun kills after 30 s."""
DONE, LOST, REFUSED = 0, 1, 2
"""Exit codes: the server has ended, it is not there, it does not want this process."""


class RankAgent:
    """The agent of one rank. `environment`: variables of its worker process alone, its device."""

    def __init__(
        self,
        launch: Launch,
        port: int,
        secret: bytes,
        patience: float,
        environment: Mapping[str, str],
    ) -> None:
        """`patience`: seconds that the server may be silent."""
        self._launch, self._port, self._secret, self._patience = launch, port, secret, patience
        self._environment = environment
        self._line: Line | None = None
        self._life: _Life | None = None
        self._leaving = False
        self._ended: asyncio.Future[Bye | None] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Until the server ends, which is the exit code."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._connect()
            except (OSError, EOFError) as error:
                logger.error("no server at %s, port %d: %s", self._launch.host, self._port, plain(error))
                return LOST
            bye = await self._ended
            await self._drop_life()
            if bye is not None and bye.why is not None:
                logger.error("the server does not want this process: %s", bye.why)
                return REFUSED
            if bye is not None or self._leaving:
                return DONE
            self._ended = loop.create_future()

    def leave(self) -> None:
        """Ends `run` when the server has ended, LEAVE_SECONDS later at most; at once where there is none, or when it is
        called again.
        """
        if self._leaving or self._line is None:
            self._stop()
            return
        self._leaving = True
        asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._stop)

    def _stop(self) -> None:
        self._leaving = True
        if not self._ended.done():
            self._ended.set_result(Bye())

    async def _connect(self) -> None:
        """Raises OSError or EOFError when there was no server for CONNECT_SECONDS, or it has another secret."""
        loop, until = asyncio.get_running_loop(), time.monotonic() + CONNECT_SECONDS
        self._line = None
        while not self._ended.done():
            try:
                sock, connection = await asyncio.to_thread(self._greeted)
                break
            except PermissionError:
                raise
            except (OSError, EOFError) as error:
                # it may be on its way, or on its way back
                if time.monotonic() >= until:
                    raise
                logger.debug("no server yet: %s", plain(error))
                await asyncio.wait({self._ended}, timeout=RETRY_SECONDS)
        else:
            return
        self._line = Line(
            sock, connection, self._patience, loop=loop, on_message=self._on_message, on_end=self._on_line_end
        )
        launch = self._launch
        self._line.say(Hello(rank=launch.rank, world=launch.world, host=platform.node(), pid=os.getpid()))

    def _greeted(self) -> tuple[socket.socket, Any]:
        sock = socket.create_connection((self._launch.host, self._port), timeout=self._patience)
        return sock, greeted(sock, self._secret, server=False)

    def _on_line_end(self, why: str) -> None:
        if not self._ended.done():
            logger.info("the server is gone: %s", why)
            self._ended.set_result(None)

    def _on_message(self, message: object) -> None:
        match message:
            case Begin():
                assert self._line is not None
                self._life = _Life(message, self)
            case End() if self._life is not None:
                self._life.end()
            case Bye():
                if not self._ended.done():
                    self._ended.set_result(message)
            case Plan() | Sleep() | Wake() | Record() | EndRecording() | LoadAdapter() | UnloadAdapter() if (
                self._life is not None
            ):
                self._life.send(message)

    async def _drop_life(self) -> None:
        life, self._life = self._life, None
        if life is not None:
            await life.abandon()
        if self._line is not None:
            self._line.cut()
            self._line = None

    def start(self, begin: Begin, opened: tuple[EngineConfig, Checkpoint], deliver: Deliver) -> WorkerProcess:
        """The process of a life. Raises OSError or RuntimeError."""
        launch = self._launch
        place = meeting(launch.rank, launch.world, launch.host, launch.port, begin.meeting)
        return WorkerProcess(
            begin.assignment.worker,
            *opened,
            {**place, **self._environment},
            deliver,
            obituary_of(launch.rank, launch.world),
        )

    def tell(self, life: int, report: Report) -> None:
        """Says what a life reports, to a server that is there."""
        if self._line is not None:
            self._line.say((life, report))


def _opened(assignment: Assignment) -> tuple[EngineConfig, Checkpoint]:
    if Path(assignment.folder).is_dir():
        # of relative paths, as on the server
        os.chdir(assignment.folder)
    return opened_here(assignment, lambda report: logger.info("%s", report) if isinstance(report, Loading) else None)


class _Life:
    """One life of the rank: its checkpoint is opened, then it is a process."""

    def __init__(self, begin: Begin, agent: RankAgent) -> None:
        self._begin, self._agent = begin, agent
        self._process: WorkerProcess | None = None
        self._over = False
        self._starting = asyncio.get_running_loop().create_task(self._start(begin.assignment))

    def send(self, message: Plan | Order) -> None:
        if self._process is not None:
            try:
                self._process.send(message)
            except Unavailable as error:
                # its end is on its way
                logger.debug("%s", error)

    def end(self) -> None:
        """Kills it. Died follows."""
        self._over = True
        if self._process is not None:
            self._process.end()
        else:
            self._fail(Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message="ended before its start"))

    async def abandon(self) -> None:
        """Returns when it is gone."""
        self._over = True
        # what opens the checkpoint may download it, in a thread that goes on and whose answer nobody wants
        self._starting.cancel()
        if self._process is not None:
            await asyncio.to_thread(self._process.abandon)

    async def _start(self, assignment: Assignment) -> None:
        try:
            opened = await asyncio.to_thread(_opened, assignment)
            if not self._over:
                self._process = self._agent.start(self._begin, opened, self._deliver)
        except OmniError as error:
            self._fail(error.failure)
        except (OSError, RuntimeError) as error:
            self._fail(not_started(error))

    def _fail(self, failure: Failure) -> None:
        self._deliver(Died(failure=failure))

    def _deliver(self, report: Report) -> None:
        if isinstance(report, Recorded):
            # its files are in blocks of this host
            files = [
                dataclasses.replace(one, data=dataclasses.replace(one.data, data=shared.take(one.data)))
                for one in report.files
            ]
            report = dataclasses.replace(report, files=tuple(files))
        self._agent.tell(self._begin.life, report)
