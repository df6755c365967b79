"""Memory of the worker: its peak, and what the host has left for it."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""Where Linux says what the machine has, and what a container may use of it."""


def peak_memory_bytes() -> int:
    """The peak memory of the worker: of the device where it runs on one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # ru_maxrss is in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host_memory_free(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes of the host's memory that can still be taken: what the machine has available, or what is left of the limit
    of the container, whichever is less. Files that the container could do without (its page cache) count as left.
    """
    lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit = _number(cgroup / "memory.max")
    used = _number(cgroup / "memory.current")
    if limit is None or used is None:
        return free
    statistics = (cgroup / "memory.stat").read_text(encoding="utf-8").splitlines()
    cached = sum(int(line.split()[1]) for line in statistics if line.startswith(("inactive_file ", "active_file ")))
    return min(free, max(0, limit - used + cached))


def _number(file: Path) -> int | None:
    """What a file says; None where there is none, or no limit ("max")."""
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else "max"
    return None if text == "max" else int(text)
