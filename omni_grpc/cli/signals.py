"""What ends a command from outside: Ctrl-C, and SIGTERM and SIGHUP in the same way."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGTERM,)
"""The signals that would end a process at once, before it has cancelled its job."""


class Terminated(KeyboardInterrupt):
    """A signal asked the process to end. It unwinds as Ctrl-C does, so whoever cleans up after that does so here."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"the client was ended by {number.name}")
        self.number = number


def run(command: Callable[[], int]) -> int:
    """Runs a command that a signal interrupts, and returns its exit code: that of a shell, 128 and the signal's number,
    for one that was interrupted. A signal that is ignored, as by nohup, stays so.
    """
    try:
        with _raised():
            return command()
    except KeyboardInterrupt as interrupt:
        number = interrupt.number if isinstance(interrupt, Terminated) else signal.SIGINT
        what = "interrupted" if number is signal.SIGINT else f"ended by {number.name}"
        print(what, *getattr(interrupt, "__notes__", ()), sep="\n", file=sys.stderr)
        return 128 + number


@contextlib.contextmanager
def _raised() -> Iterator[None]:
    """Within it, signals raise Terminated. Python delivers them to the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    mine = {number: how for number, how in before.items() if how is signal.SIG_DFL}
    for number in mine:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, how in mine.items():
            signal.signal(number, how)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated(signal.Signals(number))
