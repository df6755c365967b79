"""Reads a few numbers from the device without holding up the other threads of the process."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

SPINS = 200
"""Looks at the event that only give other threads a turn, about 100 us; a longer wait sleeps between looks."""
NAP = 50e-6


def read_back(tensor: Tensor) -> Any:
    """`tensor.tolist()` of a tensor [...], of any shape. On CUDA it is copied to pinned memory behind the work queued
    on the current stream, and an event is polled: a thread that blocks in the driver may hold locks that others need to
    launch.
    """
    if not tensor.is_cuda:
        return tensor.tolist()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.device(tensor.device):
        host.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
    looks = 0
    while not arrived.query():
        time.sleep(0 if looks < SPINS else NAP)
        looks += 1
    return host.tolist()
