"""The memory of the worker: its peak, what the host has left, and what a piece of work takes of the device."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""Where Linux says what the machine has, and what a container may use of it."""

T = TypeVar("T")


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


def host_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> tuple[int, int]:
    """Bytes of the host's memory that are taken, and that there are: of the machine's, or of what a container may use
    of it.
    """
    lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines() if ":" in line)
    limit = _number(cgroup / "memory.max")
    total = int(lines["MemTotal"].split()[0]) * 1024
    total = total if limit is None else min(total, limit)
    return max(0, total - host_memory_free(meminfo, cgroup)), total


def _number(file: Path) -> int | None:
    """What a file says; None where there is none, or no limit ("max")."""
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else "max"
    return None if text == "max" else int(text)


class Meter(Protocol):
    """Counts bytes of device memory."""

    def allocated(self) -> int:
        """What is taken now."""

    def peak(self, work: Callable[[], T]) -> tuple[T, int]:
        """Does it, and says the most that was taken meanwhile, what had been taken before included."""

    def available(self) -> float:
        """What there is, for weights and requests together, with nothing else of this process in the way."""


class DeviceMeter:
    """By the allocator of torch, on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        # not all that asks the allocator takes "cuda" for the current device
        self._device = torch.cuda.current_device() if device.index is None else device.index

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self, work: Callable[[], T]) -> tuple[T, int]:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        result = work()
        torch.cuda.synchronize(self._device)
        return result, torch.cuda.max_memory_allocated(self._device)

    def available(self) -> float:
        """What torch has reserved and what is free, within the fraction that this process is allowed."""
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        there = free + torch.cuda.memory_reserved(self._device)
        # older versions of torch can set it, but not tell
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(self._device)
        return min(there, fraction * total)


def meter_of(device: torch.device) -> Meter | None:
    """What measures on a device; None on a CPU, whose memory is nobody's alone."""
    return DeviceMeter(device) if device.type == "cuda" else None
