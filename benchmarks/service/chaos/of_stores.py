"""No room on the disk or in /dev/shm, and a database that is away, hangs, or is cut off."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.store.postgres import Postgres, programs

from ..lives import POSTGRESQL
from .fault import Fault
from .machine import until
from .proxy import Proxy, Weather
from .stage import Setting, Stage

DISK_BYTES = 64 << 20
SHM_BYTES = 1 << 20


def no_mounts() -> str:
    """Root alone may mount a small file system, and not in every container."""
    if os.getuid() != 0:
        return "mounting a small file system needs root"
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    tried = ("unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    return f"a small file system cannot be mounted here: {done.stderr.strip()}" if done.returncode else ""


def no_database() -> str:
    return "" if programs() else "PostgreSQL is not installed"


# --- no room ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _small_disk(setting: Setting) -> Iterator[Path]:
    folder = setting.folder / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], check=True)
    setting.folder = folder / "state"
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _fill(path: Path) -> None:
    """Until nothing more fits."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def _disk_full(stage: Stage, folder: Path, seconds: float) -> None:
    filler = folder / "filler"
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        # what jobs that end give back is taken too
        _fill(filler)
        time.sleep(0.05)
    filler.unlink()


def _files_limited(stage: Stage, tools: Any, seconds: float) -> None:
    """Nothing may grow beyond 4 KiB: each write of the server behind that fails with EFBIG."""
    before = resource.prlimit(stage.life.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(stage.life.pid, resource.RLIMIT_FSIZE, (4096, before[1]))
    time.sleep(seconds)
    resource.prlimit(stage.life.pid, resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def _small_shm(setting: Setting) -> Iterator[None]:
    setting.private_shm = SHM_BYTES
    yield None


def _shm_full(stage: Stage, tools: Any, seconds: float) -> None:
    filler = stage.root / "dev/shm/filler"
    _fill(filler)
    time.sleep(seconds)
    filler.unlink()


# --- the database -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_database(setting: Setting) -> Iterator[Postgres]:
    from .stage import database

    with database() as (server, url, _):
        setting.state_url = url
        yield server


def _database_stopped(stage: Stage, server: Postgres, seconds: float) -> None:
    server.stop("fast")
    time.sleep(seconds)
    server.start()


def _database_killed(stage: Stage, server: Postgres, seconds: float) -> None:
    killed = server.processes()
    for pid in killed:
        # a child may have ended with its parent
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(seconds)
    # it does not start while one of its processes is there
    until(lambda: not any(psutil.pid_exists(pid) for pid in killed), 10)
    server.start()


def _database_hangs(stage: Stage, server: Postgres, seconds: float) -> None:
    stopped = server.processes()
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _database_behind_proxy(setting: Setting) -> Iterator[Proxy]:
    from .stage import database

    with database() as (_, url, path):
        proxy = Proxy(path)
        name = url.partition("?")[0].rpartition("/")[2]
        setting.state_url = f"postgresql://omni@127.0.0.1:{proxy.port}/{name}"
        try:
            yield proxy
        finally:
            proxy.close()


def _cut_off(stage: Stage, proxy: Proxy, seconds: float) -> None:
    with proxy.weather(Weather(refusing=True)):
        proxy.cut()
        time.sleep(seconds)


def weather(given: Weather) -> Callable[[Stage, Proxy, float], None]:
    def strike(stage: Stage, proxy: Proxy, seconds: float) -> None:
        with proxy.weather(given):
            time.sleep(seconds)

    return strike


FAULTS = (
    Fault(
        name="disk_full",
        what=f"the file system of jobs and outputs ({DISK_BYTES >> 20} MiB) is full for 3 s",
        strike=_disk_full,
        around=_small_disk,
        seconds=3.0,
        lacks=no_mounts,
    ),
    Fault(
        name="files_limited",
        what="every write of the server behind 4 KiB of a file fails for 3 s (RLIMIT_FSIZE)",
        strike=_files_limited,
        seconds=3.0,
    ),
    Fault(
        name="shm_full",
        what=f"/dev/shm ({SHM_BYTES >> 20} MiB) is full for 3 s",
        strike=_shm_full,
        around=_small_shm,
        seconds=3.0,
        harmless=True,
        lacks=no_mounts,
    ),
    Fault(
        name="database_stopped",
        what="PostgreSQL is stopped, and started after 3 s",
        strike=_database_stopped,
        around=own_database,
        stores=(POSTGRESQL,),
        seconds=3.0,
        lacks=no_database,
    ),
    Fault(
        name="database_killed",
        what="SIGKILL to all processes of PostgreSQL, and a start after 1 s",
        strike=_database_killed,
        around=own_database,
        stores=(POSTGRESQL,),
        seconds=1.0,
        lacks=no_database,
        within=30.0,
    ),
    Fault(
        name="database_hangs",
        what="SIGSTOP to all processes of PostgreSQL, SIGCONT after 5 s",
        strike=_database_hangs,
        around=own_database,
        stores=(POSTGRESQL,),
        seconds=5.0,
        lacks=no_database,
    ),
    Fault(
        name="database_cut",
        what="all connections to PostgreSQL are reset, and new ones for 3 s",
        strike=_cut_off,
        around=_database_behind_proxy,
        stores=(POSTGRESQL,),
        seconds=3.0,
        lacks=no_database,
    ),
    Fault(
        name="database_silent",
        what="nothing comes through to PostgreSQL or back for 12 s, and nobody is told",
        strike=weather(Weather(stalled=True)),
        around=_database_behind_proxy,
        stores=(POSTGRESQL,),
        seconds=12.0,
        lacks=no_database,
        within=30.0,
    ),
    Fault(
        name="database_far",
        what="40 +- 30 ms and 2 % of loss each way to PostgreSQL, and resets, for 5 s",
        strike=weather(Weather(delay=0.04, jitter=0.03, loss=0.02, cuts=0.2)),
        around=_database_behind_proxy,
        stores=(POSTGRESQL,),
        seconds=5.0,
        lacks=no_database,
    ),
)
