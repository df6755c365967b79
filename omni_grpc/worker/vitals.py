"""How this process is: looked at once a second by a thread of its own, since a driver that hangs must not hold up the
thread that gives signs of life.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from omni_grpc.features.cuda_graphs import CAPTURES, REPLAYS
from omni_grpc.ops.tuning import choices
from omni_grpc.types.vitals import Vitals
from omni_grpc.worker.memory import host_memory

logger = logging.getLogger(__name__)

STATM = Path("/proc/self/statm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LOOK_SECONDS = 1.0


def resident_bytes() -> int:
    """The host memory that this process has."""
    return int(STATM.read_text(encoding="ascii").split()[1]) * PAGE_BYTES


def vitals_of(device: torch.device | None, counts: Mapping[str, int]) -> Vitals:
    """Those of this process now. `device`: what it computes on, None before that is known; `counts` is what features
    count, by name.
    """
    vitals = Vitals(
        resident_bytes=resident_bytes(),
        graph_captures=counts.get(CAPTURES, 0),
        graph_replays=counts.get(REPLAYS, 0),
    )
    if device is None:
        return vitals
    if device.type != "cuda":
        used, total = host_memory()
        return dataclasses.replace(vitals, device=device.type, device_used_bytes=used, device_total_bytes=total)
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    return dataclasses.replace(
        vitals,
        device=f"cuda:{index}",
        device_used_bytes=total - free,
        device_total_bytes=total,
        kernels=tuple(sorted(choices(device).used)),
    )


class Looker:
    """`newest` is what `look` said last; None before that, and once it has failed."""

    def __init__(self, look: Callable[[], Vitals]) -> None:
        self._look = look
        self._ended = threading.Event()
        self.newest: Vitals | None = None
        self._thread = threading.Thread(target=self._run, name="omni_grpc-vitals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns at once: a look that hangs is not waited for."""
        self._ended.set()

    def _run(self) -> None:
        try:
            while not self._ended.wait(LOOK_SECONDS):
                self.newest = self._look()
        except Exception:
            # a device that is lost, for example: those who work with it find that too, and tell
            self.newest = None
            logger.exception("how this process is cannot be told any more")
