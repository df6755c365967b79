"""The worker as it is, except that a phase waits as long as the folder of OMNI_TEST_PAUSES has a file of its name, on
the rank that is in it or, where it is empty, on all; and raises on the rank that a file `fail-PHASE` there has in it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omni_grpc.worker import packed, process
from omni_grpc.worker.packed import PackedRunner

PHASES = ("prepare", "step", "decode")
LOADING = {"load": "load_pipeline", "warm-up": "warm_up"}
"""What is called in worker/packed.py, once all ranks have met."""


def serve(*arguments: Any) -> None:
    pause()
    process.serve(*arguments)


def pause() -> None:
    """Has phases of this process wait, and fail."""
    for phase in PHASES:
        setattr(PackedRunner, phase, _paused(phase, getattr(PackedRunner, phase)))
    for phase, name in LOADING.items():
        setattr(packed, name, _paused(phase, getattr(packed, name)))


def _paused(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    folder, rank = Path(os.environ["OMNI_TEST_PAUSES"]), os.environ["RANK"]

    @functools.wraps(call)
    def waits(*arguments: Any) -> Any:
        while _read(folder / phase) in ("", rank):
            (folder / f"{phase}.{rank}").touch()
            time.sleep(0.02)
        fails = folder / f"fail-{phase}"
        if _read(fails) == rank:
            raise RuntimeError(f"rank {rank} fails alone")
        return call(*arguments)

    return waits


def _read(path: Path) -> str | None:
    """None where there is none: a test takes it away at any moment."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
