"""The worker as it is, except that a phase waits as long as the folder of OMNI_TEST_PAUSES has a file of its name, and
raises on the rank that a file `fail-PHASE` there has in it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omni_grpc.worker import process
from omni_grpc.worker.packed import PackedRunner

PHASES = ("prepare", "step", "decode")


def serve(*arguments: Any) -> None:
    pause()
    process.serve(*arguments)


def pause() -> None:
    """Has phases of this process wait, and fail."""
    for phase in PHASES:
        setattr(PackedRunner, phase, _paused(phase, getattr(PackedRunner, phase)))


def _paused(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    folder, rank = Path(os.environ["OMNI_TEST_PAUSES"]), os.environ["RANK"]

    @functools.wraps(call)
    def waits(*arguments: Any) -> Any:
        if (folder / phase).exists():
            (folder / f"{phase}.{rank}").touch()
        while (folder / phase).exists():
            time.sleep(0.02)
        fails = folder / f"fail-{phase}"
        if fails.exists() and fails.read_text() == rank:
            raise RuntimeError(f"rank {rank} fails alone")
        return call(*arguments)

    return waits
