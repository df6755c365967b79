"""The clock of the machine jumps, forward and back by an hour, with libfaketime around the server."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

from ..lives import POSTGRESQL, SQLITE
from .fault import Fault
from .stage import Setting, Stage

LIBRARIES = "*/faketime/libfaketime.so.1"
HOUR = 3600


def library() -> Path | None:
    return next(iter(sorted(Path("/usr/lib").glob(LIBRARIES))), None)


def _lacks() -> str:
    return "" if library() else "libfaketime is not installed: apt-get install libfaketime"


@dataclasses.dataclass(frozen=True)
class Clock:
    """What a server takes for the time of its machine; the monotonic clock goes on as it does."""

    file: Path

    def off(self, seconds: int) -> None:
        part = self.file.with_suffix(".new")
        part.write_text(f"{seconds:+d}\n", "ascii")
        part.rename(self.file)


@contextlib.contextmanager
def _faked(setting: Setting) -> Iterator[Clock]:
    clock = Clock(setting.folder / "clock")
    clock.off(0)
    setting.environment |= {
        "LD_PRELOAD": str(library()),
        "FAKETIME_TIMESTAMP_FILE": str(clock.file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }
    # what an hour of expiry would take
    setting.flags += ("--retention", "1800")
    setting.faked = 1
    yield clock


@contextlib.contextmanager
def _faked_of_two(setting: Setting) -> Iterator[Clock]:
    with _faked(setting) as clock:
        setting.servers = 2
        yield clock


def _jump(stage: Stage, clock: Clock, seconds: float) -> None:
    for hours in (1, 0, -1, 0):
        clock.off(hours * HOUR)
        time.sleep(seconds)


FAULTS = (
    Fault(
        name="clock_jumps",
        what="the server's clock goes an hour forward, back, another back, and forward, 1.5 s apart",
        strike=_jump,
        around=_faked,
        stores=(SQLITE,),
        seconds=1.5,
        harmless=True,
        lacks=_lacks,
    ),
    Fault(
        name="clock_jumps_of_one",
        what="the same with two servers, to the clock of one of them",
        strike=_jump,
        around=_faked_of_two,
        stores=(POSTGRESQL,),
        seconds=1.5,
        harmless=True,
        lacks=_lacks,
    ),
)
