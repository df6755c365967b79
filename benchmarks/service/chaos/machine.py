"""What a server leaves on its machine: processes of its session, blocks of shared memory, files and memory it holds."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from omni_grpc.types import shared_memory as shared

PROC = Path("/proc")


def session_of(pid: int) -> list[int]:
    """The processes of the session that this process leads or has led, without those that have ended (zombies)."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            # it has ended meanwhile
            continue
    return sorted(found)


def worker_of(pid: int) -> int | None:
    """The worker of a server; None while it has none."""
    for child in psutil.Process(pid).children():
        try:
            if "spawn_main" in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                return int(child.pid)
        except psutil.NoSuchProcess:
            continue
    return None


def blocks_of(pid: int, since: float, root: Path = Path("/")) -> list[str]:
    """Shared-memory blocks of a server that has started at `since` (Unix seconds), in the mounts that are under `root`.
    Older ones are those of another process that had its id.
    """
    folder, found = root / shared.BLOCKS.relative_to("/"), []
    for path in folder.glob(f"omni*-{pid}-*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime >= since:
                found.append(path.name)
    return sorted(found)


def files_of(pid: int) -> int:
    """The number of files and sockets that it has open."""
    return sum(1 for _ in (PROC / str(pid) / "fd").iterdir())


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
