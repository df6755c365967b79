"""A server of PostgreSQL for tests: the `postgres` fixture. Where it is not installed they are skipped, or fail if
TESTS_REQUIRE_POSTGRES=1 says that it must be there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import pytest

T = TypeVar("T")

REQUIRED = "TESTS_REQUIRE_POSTGRES"
SETTINGS = ("listen_addresses=''", "fsync=on", "shared_buffers=16MB", "max_connections=80", "logging_collector=off")
USERS = ("postgres", "nobody")
"""Who runs it where the tests run as root, whom it refuses."""


def programs() -> Path | None:
    """The folder of initdb and pg_ctl, of the newest version."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("pg_ctl")
    found = [*versions[-1:], *([Path(on_path)] if on_path else [])]
    return next((path.parent for path in found if (path.parent / "initdb").exists()), None)


class Postgres:
    """A server with its data in a folder of its own, reached over a socket in it."""

    def __init__(self, folder: Path, bin_folder: Path, user: str | None) -> None:
        self._folder = folder
        self._bin = bin_folder
        self._user = user
        self._numbers = itertools.count()

    def prepare(self) -> None:
        self._call("initdb", "-D", self._data, "-U", "omni", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")

    def start(self) -> None:
        options = " ".join(f"-c {setting}" for setting in (*SETTINGS, f"unix_socket_directories='{self._folder}'"))
        log = str(self._folder / "log")
        self._call("pg_ctl", "-D", self._data, "-l", log, "-o", options, "-w", "-t", "60", "start")

    def stop(self, mode: str = "fast") -> None:
        self._call("pg_ctl", "-D", self._data, "-m", mode, "-w", "-t", "60", "stop")

    def processes(self) -> list[int]:
        """The ids of the server's process and of its children."""
        parent = int(Path(self._data, "postmaster.pid").read_text("ascii").split()[0])
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text("ascii").split()
        return [parent, *map(int, children)]

    def url(self, name: str) -> str:
        return f"postgresql://omni@/{name}?host={self._folder}"

    async def create(self, template: str = "template1") -> str:
        """The URL of a new database."""
        name = f"omni{next(self._numbers)}"
        connection = await asyncpg.connect(self.url("postgres"))
        try:
            await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        finally:
            await connection.close()
        return self.url(name)

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def _call(self, program: str, *arguments: str) -> None:
        command = [str(self._bin / program), *arguments]
        if self._user is not None:
            command = ["runuser", "-u", self._user, "--", *command]
        # its own file for what it says: the server, which goes on, would keep a pipe open
        with tempfile.TemporaryFile() as said:
            done = subprocess.run(
                command, cwd=self._folder, stdout=said, stderr=said, stdin=subprocess.DEVNULL, timeout=120, check=False
            )
            said.seek(0)
            assert done.returncode == 0, f"{command}: {said.read().decode()}"


@contextlib.contextmanager
def running() -> Iterator[Postgres]:
    """A server of its own. Raises LookupError where there is none."""
    found = programs()
    if found is None:
        raise LookupError("PostgreSQL is not installed: apt-get install postgresql")
    user = None
    if os.getuid() == 0:
        users = {entry.pw_name for entry in pwd.getpwall()}
        user = next((one for one in USERS if one in users), None)
        if user is None or not shutil.which("runuser"):
            raise LookupError("PostgreSQL does not run as root, and there is no other user or no runuser")
    # not in pytest's folder, which other users may not enter; and the path of a socket is short
    with tempfile.TemporaryDirectory(prefix="omni-pg-") as name:
        folder = Path(name)
        if user is not None:
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        server = Postgres(folder, found, user)
        server.prepare()
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate")


def started() -> Iterator[Postgres]:
    """A running server, or the outcome of every test that needs one."""
    try:
        with running() as server:
            yield server
    except LookupError as error:
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{error} ({REQUIRED}=1)")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    yield from started()


def new_database(postgres: Postgres) -> str:
    """The URL of a new database, for fixtures that run outside of a loop."""
    return outside(postgres.create())


def outside(work: Coroutine[Any, Any, T]) -> T:
    """Runs it on a loop of another thread: fixtures of a session are made while a test's loop runs."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
