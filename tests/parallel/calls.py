"""Which calls of torch.distributed ranks make, in which order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from omni_grpc.nn.stack import Carry


class Log:
    """What was called, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, call: str) -> None:
        self.calls.append(call)


class Watched:
    """A message on its way, whose `wait` is logged."""

    def __init__(self, work: dist.Work, log: Log, name: str) -> None:
        self._work, self._log, self._name = work, log, name

    def wait(self) -> bool:
        self._log(f"wait {self._name}")
        return self._work.wait()


@contextlib.contextmanager
def logged(log: Log, *collectives: str) -> Iterator[None]:
    """Logs the calls of these functions of torch.distributed, numbered one by one, and the waits for each."""
    counts = dict.fromkeys(collectives, 0)

    def watch(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            which = f"{name} {counts[name]}"
            counts[name] += 1
            log(which)
            work = call(*arguments, **options)
            if isinstance(work, list):
                return [Watched(each, log, which) for each in work]
            # what is not begun but done gives none
            return work and Watched(work, log, which)

        return watched

    with contextlib.ExitStack() as patches:
        for name in collectives:
            patches.enter_context(mock.patch.object(dist, name, watch(name, getattr(dist, name))))
        yield


@dataclasses.dataclass
class Passed:
    """What came out, and what was called."""

    out: Carry
    calls: list[str]
