"""The worker or the server is killed, or stopped and continued."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from ..lives import POSTGRESQL, SQLITE
from .checker import left_behind
from .fault import Fault
from .machine import blocks_of, until, worker_of
from .stage import LEASE, Setting, Stage


def _worker(stage: Stage) -> int:
    found: list[int] = []

    def there() -> bool:
        worker = worker_of(stage.life.pid)
        if worker is not None:
            found.append(worker)
        return worker is not None

    if not until(there, 15):
        raise RuntimeError("the server has no worker")
    return found[-1]


def _worker_killed(stage: Stage, tools: Any, seconds: float) -> None:
    os.kill(_worker(stage), signal.SIGKILL)


def _worker_stopped(stage: Stage, tools: Any, seconds: float) -> None:
    """For less than --worker-timeout, so that it goes on, or for more, so that it is replaced: by turns of chance."""
    worker = _worker(stage)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(stage.chance.choice((0.5, 4.5)))
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGCONT)


def _server_killed(stage: Stage, tools: Any, seconds: float) -> None:
    """The server alone: what it has started must see that it is gone."""
    os.kill(stage.life.pid, signal.SIGKILL)
    stage.life.ended(10)
    for problem in left_behind(stage.life):
        stage.ledger.report(problem)
    stage.restart()


def _all_killed(stage: Stage, tools: Any, seconds: float) -> None:
    """The server with all that it has started, at once: nobody is left to free its blocks but the next one."""
    before = stage.life
    before.kill()
    stage.restart()
    if not until(lambda: not blocks_of(before.pid, before.began), 5):
        stage.ledger.report(f"the next server has left {len(blocks_of(before.pid, before.began))} blocks")


def _server_stopped(stage: Stage, tools: Any, seconds: float) -> None:
    os.kill(stage.life.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(stage.life.pid, signal.SIGCONT)


def _group_stopped(stage: Stage, tools: Any, seconds: float) -> None:
    """The server with its worker, as a machine that is suspended."""
    os.killpg(stage.life.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.killpg(stage.life.pid, signal.SIGCONT)


@contextlib.contextmanager
def _two(setting: Setting) -> Iterator[None]:
    setting.servers = 2
    yield None


FAULTS = (
    Fault(name="worker_killed", what="SIGKILL to the worker", strike=_worker_killed),
    Fault(
        name="worker_stopped",
        what="SIGSTOP to the worker, SIGCONT after 0.5 s or after its timeout",
        strike=_worker_stopped,
    ),
    Fault(
        name="server_killed",
        what="SIGKILL to the server alone, and a new one",
        strike=_server_killed,
        stores=(SQLITE, POSTGRESQL),
        within=20.0,
    ),
    Fault(
        name="all_killed",
        what="SIGKILL to the server and all of its processes at once, and a new one",
        strike=_all_killed,
        within=20.0,
    ),
    Fault(
        name="server_stopped",
        what="SIGSTOP to the server, SIGCONT after 4 s",
        strike=_server_stopped,
        seconds=4.0,
    ),
    Fault(
        name="machine_suspended",
        what="SIGSTOP to the server and its worker, SIGCONT after 6 s",
        strike=_group_stopped,
        seconds=6.0,
    ),
    Fault(
        name="server_taken_over",
        what="two servers; SIGSTOP to one for longer than its lease, then SIGCONT",
        strike=_server_stopped,
        around=_two,
        stores=(POSTGRESQL,),
        seconds=2.5 * LEASE,
    ),
)
