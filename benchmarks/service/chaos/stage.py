"""The server that a fault strikes, with its store, its clients' ledger, and what stands around it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.store.postgres import Postgres, new_database, running

from ..ledger import Ledger
from ..lives import POSTGRESQL, QUICK, SQLITE, START_SECONDS, Life
from ..quick_worker import MODEL

LEASE = 2.0
"""Seconds after which a server of PostgreSQL counts as lost."""
FLAGS = (
    *("--lease-seconds", f"{LEASE:g}", "--retention", "86400", "--max-queue", "4096", "--restart-backoff", "0.1"),
    *("--max-num-seqs", "4", "--worker-timeout", "3", "--drain-timeout", "5"),
)
MODELS = {QUICK: MODEL, "real": "demo"}


@dataclasses.dataclass
class Setting:
    """What a fault asks for before the server starts. `private_shm`: bytes of a /dev/shm of its own; 0: that of the
    machine. `folder`: where it keeps jobs, or their outputs.
    """

    store: str
    folder: Path
    worker: str = QUICK
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    private_shm: int = 0
    state_url: str = ""
    front: str = ""
    """The address that clients are given instead of the server's."""
    servers: int = 1
    port: int = 0
    """That of the first server; 0: any that is free."""
    faked: int | None = None
    """How many servers, from the first on, have `environment`; None: all."""


class Stage:
    """Servers, the first of which is the one that is struck."""

    def __init__(self, setting: Setting, log: Path, seed: int) -> None:
        self._setting = setting
        self.log = log
        self.chance = random.Random(seed)
        self.ledger = Ledger()
        self.ports = [setting.port or free_port(), *(free_port() for _ in range(setting.servers - 1))]
        self.lives: list[Life] = []
        self.model = MODELS[setting.worker]

    @property
    def life(self) -> Life:
        return self.lives[0]

    @property
    def address(self) -> str:
        """Where clients go."""
        return self._setting.front or self.direct

    @property
    def direct(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    @property
    def root(self) -> Path:
        """The mounts that the server sees."""
        return Path(f"/proc/{self.life.pid}/root") if self._setting.private_shm else Path("/")

    @property
    def folder(self) -> Path:
        return self._setting.folder

    def start(self) -> None:
        """Starts all. Raises RuntimeError where one does not take jobs."""
        for number in range(len(self.ports)):
            self.lives.append(self._started(number))

    def restart(self, number: int = 0) -> None:
        """The next life of one that has ended, at the same port."""
        self.lives[number] = self._started(number)

    def stop(self) -> Iterator[str]:
        """Ends them as SIGTERM does. What is wrong with that."""
        for life in self.lives:
            os.kill(life.pid, signal.SIGTERM)
        for life in self.lives:
            if (code := life.ended(30)) != 0:
                yield f"a server ended with {code} after SIGTERM"

    def close(self) -> None:
        for life in self.lives:
            life.kill()

    def _started(self, number: int) -> Life:
        setting = self._setting
        life = Life(
            setting.worker,
            (*FLAGS, *self._kept(), *setting.flags, "--port", str(self.ports[number])),
            self.log,
            setting.environment if setting.faked is None or number < setting.faked else {},
            self._prelude(),
        )
        try:
            if life.address() is None:
                raise RuntimeError(f"the server did not start in {START_SECONDS:g} s: {self.log.read_text()[-2000:]}")
        except BaseException:
            life.kill()
            raise
        return life

    def _kept(self) -> tuple[str, ...]:
        if self._setting.store == SQLITE:
            return ("--state-dir", str(self._setting.folder))
        if self._setting.store == POSTGRESQL:
            return ("--state-url", self._setting.state_url, "--artifact-url", str(self._setting.folder))
        return ()

    def _prelude(self) -> tuple[str, ...]:
        if not (size := self._setting.private_shm):
            return ()
        mounted = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" "$@"'
        return ("unshare", "--mount", "--propagation", "private", "sh", "-c", mounted)


@contextlib.contextmanager
def database() -> Iterator[tuple[Postgres, str, str]]:
    """PostgreSQL with a database: its server, the URL, and the path of its socket."""
    with running() as server:
        url = new_database(server)
        yield server, url, f"{url.partition('host=')[2]}/.s.PGSQL.5432"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="omni-chaos-") as name:
        yield Path(name)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
