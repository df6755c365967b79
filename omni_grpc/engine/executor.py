"""How the engine reaches its worker: in a process of its own, or in this one. The worker is started by import string,
so that nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Protocol, runtime_checkable

from omni_grpc.config import EngineConfig
from omni_grpc.engine.admission import not_started
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, Failure, Unavailable
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import Beat, Died, Fetched, Order, Plan, Ready, Report
from omni_grpc.types.spec import Checkpoint
from omni_grpc.types.vitals import Vitals

logger = logging.getLogger(__name__)

WORKER = "omni_grpc.worker.process:serve"
FETCHER = "omni_grpc.engine.fetch_process:serve"
LOCAL_WORKER = "omni_grpc.worker.worker:Worker"
CLOSE_SECONDS = 10.0
"""How long a worker gets to end on its own before it is killed."""

WORKER_ENVIRONMENT: Mapping[str, str] = {
    # on a CPU, oneDNN and torch's layer above it (ideep) each keep 1024 compiled primitives, one for each shape:
    # hundreds of MB after jobs of unlike sizes. A model at one size needs fewer than these
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}
"""Variables of a worker process, where the server's own environment does not set them."""

Deliver = Callable[[Report], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Obituary:
    """How the death of a process is told: who it was, before its number, and where more is to be found."""

    who: str
    why: str


OF_PROCESS = Obituary("the worker process", "see its log")


class Executor(Protocol):
    """A worker as the engine sees it. Reports are delivered on the event loop that called `start`, in order."""

    def start(self, deliver: Deliver) -> None:
        """Begins to load the model. Loading and Ready reports follow, or Died with the reason; then it may be called
        again.
        """

    def submit(self, plan: Plan) -> None:
        """Hands over work and returns at once. Raises Unavailable where the worker is gone; Died follows."""

    def order(self, order: Order) -> None:
        """Has the worker move its model. Raises like `submit`."""

    def kill(self) -> None:
        """Kills a worker that hangs. Its Died report follows."""

    async def close(self) -> None:
        """Stops the worker. No report is delivered afterwards, unless it is started again."""


@runtime_checkable
class Vital(Protocol):
    """An executor, or one life of its worker, that hears from its processes how they are."""

    def all_vitals(self) -> Mapping[int, Vitals]:
        """Of each process that has said so, by its rank."""


class Life(Protocol):
    """One life of a worker, from its start to its end. Methods are those of WorkerProcess."""

    @property
    def pid(self) -> int | None: ...

    def send(self, message: Plan | Order) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


def _resolve(path: str) -> Callable[..., object]:
    module, _, name = path.partition(":")
    target: Callable[..., object] = getattr(importlib.import_module(module), name)
    return target


def run_body(
    worker: str,
    connection: Connection,
    config: EngineConfig,
    checkpoint: Checkpoint,
    prefix: str,
    environment: Mapping[str, str],
) -> None:
    """Body of the worker process. Ctrl-C, a terminal that closes and a service manager that stops the group reach every
    process of it; the parent decides what they mean. It ends the worker by SIGKILL, and the worker ends with the pipe.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ.update(environment)
    for name, value in WORKER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _resolve(worker)(connection, config, checkpoint, prefix)


class ProcessExecutor:
    """A worker in a spawned process of its own. Spawn, never fork: grpc's threads do not survive a fork. `environment`:
    variables of that process alone. `obituary` is how its death is told.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        worker: str = WORKER,
        environment: Mapping[str, str] | None = None,
        obituary: Obituary = OF_PROCESS,
    ) -> None:
        self._arguments = (worker, config, checkpoint, environment or {})
        self._obituary = obituary
        self._process: Life | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self, deliver: Deliver) -> None:
        self._process = None
        try:
            self._process = self._begin(deliver)
        except (OSError, RuntimeError) as error:
            # no memory, file descriptors or threads left for it
            asyncio.get_running_loop().call_soon(deliver, Died(failure=not_started(error)))

    def _begin(self, deliver: Deliver) -> Life:
        return WorkerProcess(*self._arguments, deliver, self._obituary)

    def all_vitals(self) -> Mapping[int, Vitals]:
        """Of each process of the worker, by its rank."""
        return self._process.all_vitals() if isinstance(self._process, Vital) else {}

    def submit(self, plan: Plan) -> None:
        if self._process is None:
            raise gone()
        self._process.send(plan)

    def order(self, order: Order) -> None:
        if self._process is None:
            raise gone()
        self._process.send(order)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._process.close)


class HubExecutor:
    """A worker for a model of the hub. The model is downloaded first, also in a process: unlike download threads, it
    can be ended at any moment, and leaves the event loop alone.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        fetcher: str = FETCHER,
        worker: str = WORKER,
        environment: Mapping[str, str] | None = None,
        make: Callable[[Checkpoint], ProcessExecutor] | None = None,
    ) -> None:
        """`make`: the executor for the checkpoint once it is there; None: a worker in one process."""
        self._make = make or functools.partial(ProcessExecutor, config, worker=worker, environment=environment)
        self._closed = False
        self._fetcher = ProcessExecutor(config, checkpoint, worker=fetcher)
        self._inner = self._fetcher

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        if self._inner is self._fetcher:
            deliver(Loading(phase=LoadPhase.DOWNLOADING))
            self._fetcher.start(self._on_fetch)
        else:
            self._inner.start(deliver)

    def all_vitals(self) -> Mapping[int, Vitals]:
        return self._inner.all_vitals()

    def submit(self, plan: Plan) -> None:
        self._inner.submit(plan)

    def order(self, order: Order) -> None:
        self._inner.order(order)

    def kill(self) -> None:
        self._inner.kill()

    async def close(self) -> None:
        self._closed = True
        await self._inner.close()

    def _on_fetch(self, report: Report) -> None:
        match report:
            case Fetched(checkpoint=checkpoint):
                if self._closed:
                    return
                self._inner = self._make(checkpoint)
                self._deliver(report)
                self._deliver(Loading())
                self._inner.start(self._deliver)
            case Died() if self._inner is not self._fetcher:
                # its work was done before
                return
            case _:
                self._deliver(report)


class WorkerProcess:
    """One life of a worker: a process, the pipe to it, and the thread that reads its reports."""

    def __init__(
        self,
        worker: str,
        config: EngineConfig,
        checkpoint: Checkpoint,
        environment: Mapping[str, str],
        deliver: Deliver,
        obituary: Obituary = OF_PROCESS,
    ) -> None:
        self._words = obituary
        self._timeout, self._load_timeout = config.worker.worker_timeout, config.worker.phase_timeout
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self.vitals: Vitals | None = None
        """What it said of itself last."""
        self._prefix = block_prefix()
        self._closing = self._hung = False
        self._last_words: Failure | None = None
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=run_body,
            args=(worker, theirs, config, checkpoint, self._prefix, environment),
            name="omni_grpc-worker",
            daemon=True,
        )
        self._process.start()
        # the worker holds the only other end: its death is an end of file here
        theirs.close()
        self._reader = threading.Thread(target=self._read, name="omni_grpc-reports", daemon=True)
        try:
            self._reader.start()
        except RuntimeError:
            self._process.kill()
            raise

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def prefix(self) -> str:
        """What the names of its blocks begin with: those that are left are freed at its end."""
        return self._prefix

    def all_vitals(self) -> Mapping[int, Vitals]:
        return {} if self.vitals is None else {0: self.vitals}

    def send(self, message: Plan | Order) -> None:
        try:
            self._connection.send(message)
        except OSError:
            # the reader sees the same end of file and delivers Died, which is where a death is handled
            raise gone() from None

    def kill(self) -> None:
        self._hung = True
        self._process.kill()

    def end(self) -> None:
        """Kills a worker that does not hang. Died follows."""
        self._process.kill()

    def abandon(self) -> None:
        """Kills a worker of which nothing is wanted any more, and returns when it is gone."""
        self._closing = True
        self._process.kill()
        self._reader.join()

    def close(self) -> None:
        """Asks the worker to end, kills it if it does not, and returns when it is gone."""
        self._closing = True
        try:
            self._connection.send(None)
        except OSError:
            logger.info("worker had ended before it was asked to")
        # the reader thread ends with the process; a second thread that waits for the process could miss its end
        self._reader.join(CLOSE_SECONDS)
        if self._reader.is_alive():
            logger.warning("worker %s did not end within %g s, killing it", self._process.pid, CLOSE_SECONDS)
            self._process.kill()
        self._reader.join()

    def _read(self) -> None:
        """Body of the reader thread. However it ends, the worker is gone by then and Died follows."""
        try:
            self._deliver_reports()
        except (EOFError, OSError) as error:
            # the end of the pipe, also in the middle of a report ("got end of file during message")
            level = logging.DEBUG if self._closing else logging.INFO
            logger.log(
                level, "the worker's pipe has ended: %s", "end of file" if isinstance(error, EOFError) else plain(error)
            )
        except Exception as error:
            logger.exception("a report of the worker process %s cannot be read", self._process.pid)
            why = f"{type(error).__name__}: {plain(error)}"
            message = f"a report of the worker process {self._process.pid} cannot be read: {why}"
            self._last_words = Failure(code=Code.INTERNAL, reason="WORKER_ERROR", message=message)
            self._process.kill()
        self._process.join(CLOSE_SECONDS)
        if self._process.is_alive():
            logger.warning("worker %s closed its pipe and did not end, killing it", self._process.pid)
            self._process.kill()
            self._process.join()
        # on the loop, behind the reports that wait there: their blocks are taken first
        self._loop.call_soon_threadsafe(self._bury)

    def _deliver_reports(self) -> None:
        # it imports before it gives signs of life; then it loads, and a read of weights may keep it from them for long
        patience: float | None = None
        while True:
            if not self._connection.poll(patience):
                self.kill()
            report = self._connection.recv()
            if isinstance(report, Beat):
                self.vitals = report.vitals
            if isinstance(report, Ready):
                patience = self._timeout
            elif patience is None and isinstance(report, Beat):
                patience = self._load_timeout
            if isinstance(report, Died):
                # the process is of no more use, and must be gone before the next one is started
                self._last_words = report.failure
                self._process.kill()
            elif not isinstance(report, Beat):
                self._loop.call_soon_threadsafe(self._deliver, report)

    def _bury(self) -> None:
        if swept := shared.sweep(self._prefix):
            logger.warning("freed %d shared-memory blocks of the ended worker", swept)
        if not self._closing:
            self._deliver(Died(failure=self._obituary()))

    def _obituary(self) -> Failure:
        if self._last_words is not None:
            return self._last_words
        if self._hung:
            message = f"{self._words.who} {self._process.pid} stopped responding and was killed"
            return Failure(code=Code.UNAVAILABLE, reason="WORKER_HUNG", message=message)
        code = self._process.exitcode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        # the kernel kills so where the host's memory runs out, and nothing is left to be logged
        why = "the system log says whether the host ran out of memory" if code == -signal.SIGKILL else self._words.why
        message = f"{self._words.who} {self._process.pid} died {how}; {why}"
        return Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message=message)


def block_prefix() -> str:
    """What the names of the blocks of one worker begin with: the process that takes them, then a token."""
    return shared.own_prefix()


def gone() -> Unavailable:
    """The error of whoever sends something to a worker that is not there."""
    return Unavailable("plan not delivered: the worker is gone", reason="WORKER_DIED")


class LocalExecutor:
    """The same worker in this process, for offline use: no server to keep responsive, and no second process to start.

    alone: nothing else in this process uses the device. Otherwise CUDA graphs are off unless the configuration asks for
    them: during capture, no other thread may wait for the device or draw from its random generator.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, *, worker: str = LOCAL_WORKER, alone: bool = False
    ) -> None:
        if not alone and config.worker.cuda_graph_tokens is None:
            config = dataclasses.replace(config, worker=dataclasses.replace(config.worker, cuda_graph_tokens=0))
        self._arguments = (worker, config, checkpoint)

    def start(self, deliver: Deliver) -> None:
        worker, config, checkpoint = self._arguments
        loop = asyncio.get_running_loop()

        def send(report: Report) -> None:
            if isinstance(report, Died) and report.failure.reason == "DEVICE_LOST":
                # a new worker would be in this same process
                message = f"{report.failure.message}; start a new process"
                report = Died(failure=dataclasses.replace(report.failure, message=message), final=True)
            loop.call_soon_threadsafe(deliver, report)

        self._worker = _resolve(worker)(config, checkpoint, send, block_prefix())
        self._worker.start()  # type: ignore[attr-defined]

    def submit(self, plan: Plan) -> None:
        self._worker.submit(plan)  # type: ignore[attr-defined]

    def order(self, order: Order) -> None:
        self._worker.order(order)  # type: ignore[attr-defined]

    def kill(self) -> None:
        # a thread cannot be killed: the caller's process is the worker's, and it is the caller's to end
        logger.error("the worker in this process stopped responding")

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.close)  # type: ignore[attr-defined]
