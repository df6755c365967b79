"""A folder whose disk is nearly full, and a process that may write small files alone."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file may become larger than `limit` bytes, by whichever thread."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def mounted(folder: Path, *, kilobytes: int = 64, read_only: bool = False) -> Iterator[Path | None]:
    """A file system of its own in `folder`; None where this user may not mount one."""
    options = f"size={kilobytes}k" + (",ro" if read_only else "")
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
