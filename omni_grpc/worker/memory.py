"""Peak memory of the worker."""

from __future__ import annotations

import resource

import torch


def peak_memory_bytes() -> int:
    """The peak memory of the worker: of the device where it runs on one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # ru_maxrss is in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
