"""The ranks of a model on other hosts, as the server sees them: it listens, their agents come (`rank_agent`), and each
has a line through which its rank gets what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from omni_grpc.config import EngineConfig
from omni_grpc.engine.agreement import name_of
from omni_grpc.engine.assignment import Assignment
from omni_grpc.engine.executor import CLOSE_SECONDS, WORKER, Deliver, ProcessExecutor, WorkerProcess, gone
from omni_grpc.engine.rank_executor import RankGroup, RankLife, obituary_of
from omni_grpc.engine.rank_line import Line, greeted
from omni_grpc.engine.rank_network import address_to, meeting
from omni_grpc.types.errors import Code, ConfigError, Failure, Violation
from omni_grpc.types.launch import Launch
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import Died, Order, Plan, Report
from omni_grpc.types.shared_inputs import read_inputs
from omni_grpc.types.spec import Checkpoint
from omni_grpc.types.version import __version__

logger = logging.getLogger(__name__)

ARRIVE_SECONDS = 120.0
"""How long a group waits for the agent of a rank: one that was lost is started again by torchrun, or by somebody."""
MOST_GREETINGS = 32
"""Connections at a time that have not proved yet who they are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What an agent says first."""

    rank: int
    world: int
    host: str
    pid: int
    version: str = __version__


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Start a rank. `life` numbers it; what it reports comes with that number. `meeting`: name, for the store."""

    life: int
    assignment: Assignment
    meeting: str


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """Kill the rank. Its Died follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bye:
    """The server ends, or wants nothing of this agent. why: what is wrong with the agent; None where nothing is."""

    why: str | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Agent:
    hello: Hello
    line: Line


class RankLink:
    """What the agents of ranks connect to. Made and used on one event loop."""

    def __init__(self, launch: Launch, port: int, secret: bytes, patience: float) -> None:
        """Raises ConfigError where the port is not free. `patience`: seconds that an agent may be silent."""
        self.launch = launch
        self._secret, self._patience = secret, patience
        self._loop = asyncio.get_running_loop()
        self._agents: dict[int, _Agent] = {}
        self._lives: dict[int, RemoteRank] = {}
        self._numbers = 0
        self._model: str | None = None
        self._greetings = threading.Semaphore(MOST_GREETINGS)
        try:
            # of all addresses of this host the one that others know
            address = address_to(launch.host)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, port), family=family)
        except OSError as error:
            rule = f"cannot be listened at on {launch.host}: port {port}: {plain(error)}; name a free port"
            raise ConfigError(f"--rank-port {rule}", violations=(Violation("rank_port", rule),)) from error
        threading.Thread(target=self._accept, name="omni_grpc-ranks", daemon=True).start()
        logger.info("waiting for ranks 1 to %d at %s, port %d", launch.world - 1, address, port)

    def take(self, model: str) -> None:
        """Called by the one model that these ranks can have. Raises ConfigError for another one."""
        if self._model not in (None, model):
            rule = f"is {model}, but the ranks that torchrun started have {self._model}; take another server for it"
            raise ConfigError(f"--model {rule}", violations=(Violation("model", rule),))
        self._model = model

    async def close(self) -> None:
        """Lets all agents go. No rank may be running."""
        with contextlib.suppress(OSError):
            # it wakes the thread that accepts; no address is left to close where the host has lost it
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        agents, self._agents = list(self._agents.values()), {}
        for agent in agents:
            agent.line.say(Bye())
        await asyncio.gather(*(asyncio.to_thread(agent.line.close) for agent in agents))

    def begin(self, rank: int, assignment: Assignment, meeting: str, deliver: Deliver) -> RemoteRank:
        """Starts a rank, as soon as its agent is there."""
        self._numbers += 1
        life = RemoteRank(self, rank, Begin(life=self._numbers, assignment=assignment, meeting=meeting), deliver)
        self._lives[rank] = life
        if rank in self._agents:
            life.meet(self._agents[rank].hello, self._agents[rank].line)
        return life

    def _accept(self) -> None:
        """Body of a thread."""
        while True:
            try:
                sock, (host, *_) = self._listener.accept()
            except OSError as error:
                logger.debug("no longer waiting for ranks: %s", plain(error))
                return
            if not self._greetings.acquire(blocking=False):
                logger.warning("a connection from %s was closed: %d others have said nothing yet", host, MOST_GREETINGS)
                sock.close()
                continue
            threading.Thread(target=self._greet, args=(sock, host), name="omni_grpc-greeting", daemon=True).start()

    def _greet(self, sock: socket.socket, host: str) -> None:
        """Body of a thread."""
        try:
            connection = greeted(sock, self._secret, server=True)
        except (OSError, EOFError) as error:
            logger.warning("refused a connection from %s: %s", host, plain(error))
            return
        finally:
            self._greetings.release()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._welcome, sock, connection)

    def _welcome(self, sock: socket.socket, connection: Any) -> None:
        line: Line

        def on_message(message: Hello | tuple[int, Report]) -> None:
            if isinstance(message, Hello):
                self._on_hello(message, line)
            else:
                self._on_report(line, message)

        line = Line(
            sock,
            connection,
            self._patience,
            loop=self._loop,
            on_message=on_message,
            on_end=lambda why: self._on_end(line, why),
        )

    def _on_hello(self, hello: Hello, line: Line) -> None:
        world, name = self.launch.world, name_of(hello.rank, hello.world)
        if hello.version != __version__:
            line.say(Bye(f"{hello.host} has omni_grpc {hello.version}, the server {__version__}; install the same"))
            return
        if hello.world != world or not 0 < hello.rank < world:
            line.say(Bye(f"it is {name}, and the server has ranks 1 to {world - 1}; start all with the same sizes"))
            return
        if (old := self._agents.pop(hello.rank, None)) is not None:
            self._lost(old, "another process came in its place")
            old.line.cut()
        logger.info("%s is process %d of host %s", name, hello.pid, hello.host)
        self._agents[hello.rank] = _Agent(hello, line)
        if (life := self._lives.get(hello.rank)) is not None:
            life.meet(hello, line)

    def _on_report(self, line: Line, message: tuple[int, Report]) -> None:
        for rank, agent in self._agents.items():
            if agent.line is line and (life := self._lives.get(rank)) is not None:
                life.hear(*message)

    def _on_end(self, line: Line, why: str) -> None:
        for rank, agent in list(self._agents.items()):
            if agent.line is line:
                del self._agents[rank]
                self._lost(agent, why)

    def _lost(self, agent: _Agent, why: str) -> None:
        logger.info("%s on host %s is gone: %s", name_of(agent.hello.rank, self.launch.world), agent.hello.host, why)
        if (life := self._lives.get(agent.hello.rank)) is not None:
            life.lose(why)


class RemoteRank:
    """One life of a rank on another host, as WorkerProcess is one of a process here. Its methods, except for `abandon`,
    are called on the event loop.
    """

    prefix = ""

    def __init__(self, link: RankLink, rank: int, begin: Begin, deliver: Deliver) -> None:
        self._name = name_of(rank, link.launch.world)
        self._begin, self._deliver = begin, deliver
        self._line: Line | None = None
        self._hello: Hello | None = None
        self._over = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._late = self._loop.call_later(ARRIVE_SECONDS, self._on_late)

    @property
    def pid(self) -> int | None:
        """Process id of its agent, on the other host."""
        return None if self._hello is None else self._hello.pid

    def meet(self, hello: Hello, line: Line) -> None:
        """Its agent is there."""
        if self._line is None and not self._over.is_set():
            self._late.cancel()
            self._hello, self._line = hello, line
            line.say(self._begin)

    def hear(self, life: int, report: Report) -> None:
        if life != self._begin.life or self._over.is_set():
            return
        if isinstance(report, Died):
            self._end(report.failure)
        else:
            self._deliver(report)

    def lose(self, why: str) -> None:
        """Its agent is gone, and kills the rank if it lives."""
        if self._hello is not None:
            message = f"{self._name} on host {self._hello.host}, process {self._hello.pid}, was lost: {why}"
            self._end(Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message=message))

    def send(self, message: Plan | Order) -> None:
        if self._line is None or self._over.is_set():
            raise gone()
        self._line.say(functools.partial(_filled, message) if isinstance(message, Plan) and message.admit else message)

    def kill(self) -> None:
        self.end()

    def end(self) -> None:
        if self._over.is_set():
            return
        if self._line is not None:
            self._line.say(End())
        else:
            message = f"{self._name} was ended before it came"
            self._loop.call_soon(self._end, Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message=message))

    def abandon(self) -> None:
        """Ends it, and returns when it is gone, or after CLOSE_SECONDS. Not on the event loop."""
        self._loop.call_soon_threadsafe(self.end)
        if not self._over.wait(CLOSE_SECONDS):
            logger.warning("%s did not end within %g s", self._name, CLOSE_SECONDS)

    def close(self) -> None:
        self.abandon()

    def _on_late(self) -> None:
        message = (
            f"{self._name} has not come within {ARRIVE_SECONDS:g} s; start it with the torchrun of its host, and see "
            "whether that host reaches --rank-port"
        )
        self._end(Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message=message))

    def _end(self, failure: Failure) -> None:
        if not self._over.is_set():
            self._late.cancel()
            self._over.set()
            self._deliver(Died(failure=failure))


def _filled(plan: Plan) -> Plan:
    """The plan with the bytes of inputs inside: their blocks are of this host alone. Raises OSError for one that is
    gone: then the group is of no use any more, since its ranks have to do the same.
    """
    admit = [dataclasses.replace(request, inputs=read_inputs(request.inputs)) for request in plan.admit]
    return dataclasses.replace(plan, admit=tuple(admit))


class LaunchedExecutor(ProcessExecutor):
    """A worker of the ranks that torchrun has started: rank 0 is a process of the server, the others have agents."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        link: RankLink,
        *,
        environment: Mapping[str, str],
        worker: str = WORKER,
    ) -> None:
        super().__init__(config, checkpoint, worker=worker, environment=environment)
        self._config, self._link = config, link

    def _begin(self, deliver: Deliver) -> RankGroup:
        """Raises OSError where the name of rank 0's host means nothing."""
        worker, config, checkpoint, environment = self._arguments
        launch = self._link.launch
        # of each life, since the store of torchrun outlives it
        name = secrets.token_hex(4)
        place = meeting(0, launch.world, launch.host, launch.port, name)
        assignment = Assignment.of(config, device=config.model.device, worker=worker)

        def first(deliver: Deliver) -> RankLife:
            return WorkerProcess(
                worker, config, checkpoint, {**place, **environment}, deliver, obituary_of(0, launch.world)
            )

        def other(rank: int) -> Callable[[Deliver], RankLife]:
            return lambda deliver: self._link.begin(rank, assignment, name, deliver)

        return RankGroup(config, [first, *map(other, range(1, launch.world))], deliver)
