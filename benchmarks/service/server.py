"""A server in a process of its own, as its users run it, and what /proc tells about it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from benchmarks.provenance import COMMIT
from omni_grpc.types import shared_memory as shared

ROOT = Path(__file__).resolve().parents[2]
LISTENING = re.compile(r"listening on (\S+:\d+)")
START_SECONDS, STOP_SECONDS = 90.0, 15.0
PATIENCE = 60.0
"""Seconds that anything asked of a server may take before a benchmark gives up."""


class Server:
    """A running server. Its worker is a process too; CPU and memory are those of the server alone."""

    def __init__(self, pid: int, address: str, log: IO[str]) -> None:
        self.pid = pid
        self.address = address
        self._log = log

    def logged(self) -> str:
        """What it has logged so far. Read at a place of its own: the server writes at the file's."""
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def worker(self) -> int:
        """Process id of the worker. Raises LookupError while there is none."""
        for child in self.workers():
            return child
        raise LookupError("the server has no worker")

    def workers(self) -> list[int]:
        """Process ids of its workers, or ranks, in the order in which they were started."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        # multiprocessing keeps one child more, which looks after its semaphores
        return [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        return rss_bytes(self.pid)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What a server and its worker hold: memory in bytes, threads, open files and sockets, shared-memory blocks."""

    worker: int
    server_bytes: int
    worker_bytes: int
    threads: int
    files: int
    blocks: int

    def grown_since(self, before: Resources) -> Iterator[str]:
        """What is more than it was by more than is kept on purpose: caches, pools of threads."""
        rooms = {"server_bytes": 192 << 20, "worker_bytes": 512 << 20, "threads": 24, "files": 24, "blocks": 0}
        for name, room in rooms.items():
            was, now = getattr(before, name), getattr(self, name)
            if now > was + room:
                yield f"{name} grew from {was} to {now}"


def resources(server: Server) -> Resources:
    worker, proc = server.worker(), Path(f"/proc/{server.pid}")
    return Resources(
        worker=worker,
        server_bytes=server.rss_bytes(),
        worker_bytes=rss_bytes(worker),
        threads=sum(1 for _ in (proc / "task").iterdir()),
        files=sum(1 for _ in (proc / "fd").iterdir()),
        blocks=sum(1 for _ in shared.BLOCKS.glob(f"omni*-{server.pid}-*")),
    )


def rss_bytes(pid: int) -> int:
    """Memory of a process that is in RAM."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def server_environment() -> dict[str, str]:
    """That of a server: to it, every variable that begins as COMMIT does is a setting."""
    return {name: value for name, value in os.environ.items() if name != COMMIT}


@contextlib.contextmanager
def served(checkpoint: Path | str, *flags: str) -> Iterator[Server]:
    """Serves a checkpoint (a folder, or NAME=FOLDER) on a free port of 127.0.0.1 for the length of the block. Raises
    RuntimeError, with the end of its log, where it does not start.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "omni_grpc.serve", "--model", str(checkpoint)),
                *("--host", "127.0.0.1", "--port", "0", "--drain-timeout", "1", *flags),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=server_environment(),
            start_new_session=True,  # its own group, so that a kill takes its worker too
        )
        try:
            yield Server(process.pid, _address(process, log), log)
        finally:
            _stop(process)


def _address(process: subprocess.Popen[str], log: IO[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
    line = process.stdout.readline() if ready else ""
    if match := LISTENING.search(line):
        return match[1]
    log.seek(0)
    raise RuntimeError(f"the server did not start; it said {line!r} and logged:\n{log.read()[-2000:]}")


def _stop(process: subprocess.Popen[str]) -> None:
    """Asks the server to end, and kills what is left of it and its worker after STOP_SECONDS."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_SECONDS)
    if process.stdout is not None:
        process.stdout.close()
