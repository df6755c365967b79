"""Servers that are killed and started again, and the stores that outlive them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.store.postgres import new_database, running

from .server import LISTENING, ROOT, server_environment

MEMORY, SQLITE, POSTGRESQL = "memory", "sqlite", "postgresql"
STORES = (MEMORY, SQLITE, POSTGRESQL)
FSYNC: Mapping[str, str] = {
    MEMORY: "nothing is written",
    SQLITE: "WAL, synchronous=FULL: every commit waits for fsync",
    POSTGRESQL: "fsync=on, synchronous_commit=on (defaults): every commit waits for fsync",
}
QUICK, REAL = "fake", "real"
COMMANDS: Mapping[str, Sequence[str]] = {
    QUICK: ("-m", "benchmarks.service.quick_server"),
    REAL: ("-m", "omni_grpc.serve", "--warm-up-seconds", "0"),
}
"""What is started, by the kind of worker: one without a model, or that of the bundled model."""
START_SECONDS = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where servers keep their jobs. `flags` say so."""

    store: str
    flags: Sequence[str] = ()

    @property
    def durable(self) -> bool:
        return self.store != MEMORY


@contextlib.contextmanager
def place(store: str, state_url: str = "") -> Iterator[Place]:
    """A new and empty one. `state_url`: an empty database of PostgreSQL; without it, a server is started for it."""
    with contextlib.ExitStack() as stack:
        if store == MEMORY:
            yield Place(store=store)
            return
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omni-kept-"))
        if store == SQLITE:
            yield Place(store=store, flags=("--state-dir", folder))
            return
        url = state_url or new_database(stack.enter_context(running()))
        yield Place(store=store, flags=("--state-url", url, "--artifact-url", folder))


class Life:
    """One life of a server, in a group of processes of its own. What it logs goes to `log`."""

    def __init__(
        self,
        worker: str,
        flags: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        prelude: Sequence[str] = (),
    ) -> None:
        """`prelude`: a command that becomes the one that follows it (exec)."""
        with log.open("a") as said:
            self._process = subprocess.Popen(
                [*prelude, sys.executable, *COMMANDS[worker], "--host", "127.0.0.1", "--port", "0", *flags],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=server_environment() | environment,
                start_new_session=True,
            )
        self._log = log
        self.began = time.time()

    @property
    def pid(self) -> int:
        return self._process.pid

    def address(self, seconds: float = START_SECONDS) -> str | None:
        """Where it listens, once it takes jobs; None where `seconds` pass first. Raises RuntimeError, with the end of
        its log, for one that has ended.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return None
        line = self._process.stdout.readline()
        if found := LISTENING.search(line):
            return found[1]
        raise RuntimeError(f"the server did not start; it said {line!r} and logged:\n{self._log.read_text()[-3000:]}")

    def ended(self, seconds: float) -> int | None:
        """Its exit code, once it has ended; None where `seconds` pass first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        """SIGKILL to it and to all that it has started, and waits for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextlib.contextmanager
def started(worker: str, flags: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[tuple[Life, str]]:
    """A server that takes jobs, and its address. It is killed at the end."""
    life = Life(worker, flags, log, environment)
    try:
        address = life.address()
        if address is None:
            raise RuntimeError(f"the server did not start in {START_SECONDS:g} s")
        yield life, address
    finally:
        life.kill()
