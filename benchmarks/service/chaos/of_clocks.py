"""The clock of a server jumps, forward and back by an hour.

What it takes for the time (`time.time`) is off by the number in a file, which changes while it runs; the monotonic
clock goes on. libfaketime would do that for all of the process, but has `time.sleep` fail (EINVAL) where it leaves the
monotonic clock alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

from ..lives import POSTGRESQL, SQLITE
from ..quick_server import CLOCK
from .fault import Fault
from .stage import Setting, Stage

HOUR = 3600


@dataclasses.dataclass(frozen=True)
class Clock:
    """How far that of a server is off."""

    file: Path

    def off(self, seconds: int) -> None:
        part = self.file.with_suffix(".new")
        part.write_text(f"{seconds}\n", "ascii")
        part.rename(self.file)


@contextlib.contextmanager
def _faked(setting: Setting) -> Iterator[Clock]:
    clock = Clock(setting.folder / "clock")
    clock.off(0)
    setting.environment[CLOCK] = str(clock.file)
    # shorter than a jump
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
    ),
    Fault(
        name="clock_jumps_of_one",
        what="the same with two servers, to the clock of one of them",
        strike=_jump,
        around=_faked_of_two,
        stores=(POSTGRESQL,),
        seconds=1.5,
        harmless=True,
    ),
)
