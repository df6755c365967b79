"""Autotuning: the fastest of an op's candidate kernels, shape by shape, as measured on this GPU.

A candidate has a name, such as a configuration of a kernel or a library. Its times come from three places:
what this machine measured at an earlier start and kept in its cache, what is measured at warm-up on the shapes that the
model runs, and what was measured before release and comes with the package (`tuned/<card>*.json`). Nothing is measured
while requests run. Given the same times, the same shape gets the same kernel: a shape without times of its own goes by
those of the nearest size of its kind, and where there are none its op goes by a rule of its own.

What is kept belongs to a card and to the versions of torch and of this package, which are the name of its file:
$XDG_CACHE_HOME/omni_grpc/tuning (~/.cache/omni_grpc/tuning), see https://specifications.freedesktop.org/basedir-spec.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from omni_grpc.types.errors import OmniError
from omni_grpc.types.json_text import read_json
from omni_grpc.types.os_errors import plain
from omni_grpc.types.output_files import write_file
from omni_grpc.types.version import __version__

logger = logging.getLogger(__name__)

Call = Callable[[], object]
Times = dict[str, float]
"""Microseconds of one call, by the name of the kernel."""

SHIPPED = Path(__file__).resolve().parent / "tuned"
NEAR = 2.0
"""Times of one size also count for sizes up to this factor larger or smaller."""

WARM_CALLS, CALLS, ROUNDS = 2, 5, 5
ENOUGH = 1000.0
"""Microseconds after which a round makes no further call."""

AHEAD, MOST_AHEAD = 1_000_000, 16_000_000
"""GPU cycles, from about half a millisecond, that the GPU sleeps so that the host gets ahead of the timed calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One problem to time. op: its name. kind: all that times depend on except the size, such as dtype, epilogue and
    features. size: tokens, which differ from request to request.
    """

    op: str
    kind: tuple[str | int, ...]
    size: int

    @property
    def family(self) -> str:
        return " ".join(map(str, (self.op, *self.kind)))


Candidates = Callable[[Shape, torch.device], Mapping[str, Call]]
"""Makes operands of a shape, and a call for each candidate kernel."""

Wanted = dict[Shape, Candidates]


class Choices:
    """The times of one card. `path`: where what is measured is kept, None for nowhere."""

    def __init__(self, shipped: Mapping[str, Mapping[int, Times]], path: Path | None = None) -> None:
        self._shipped = shipped
        self._times: dict[str, dict[int, Times]] = {family: dict(sizes) for family, sizes in shipped.items()}
        self._own: dict[str, dict[int, Times]] = {}
        self._path = path
        self._wanted: Wanted | None = None
        self._known: dict[tuple[Shape, frozenset[str]], str | None] = {}
        self.epoch = 0
        """Incremented when answers may change."""
        self.used: set[tuple[str, str]] = set()
        """Ops, each with a kernel that it has run with, for whoever looks at this process."""
        self.memo: dict[Hashable, str] = {}
        """An op's cache of what it derived from answers. Cleared when those may change, and to record shapes."""
        if path is not None:
            self._take(read(path))

    def of(self, shape: Shape, allowed: frozenset[str], candidates: Candidates | None = None) -> str | None:
        """The fastest of the allowed kernels, None without times of a similar size. While shapes are recorded, this one
        is recorded too, if there are candidates to measure it with.
        """
        if self._wanted is not None and candidates is not None:
            self._wanted.setdefault(shape, candidates)
        key = shape, allowed
        if key not in self._known:
            self._known[key] = self._fastest(shape, allowed)
        return self._known[key]

    def near(self, shape: Shape, allowed: frozenset[str]) -> Times:
        """The times of the allowed kernels for a shape: those of the nearest size that has any, else empty. A size may
        have been measured without the kernels that are allowed here.
        """
        sizes = self._times.get(shape.family, {})
        if shape.size <= 0:
            return {}
        away = {size: abs(math.log(size / shape.size)) for size in sizes}
        for size in sorted(away, key=lambda size: (away[size], size)):
            times = {name: taken for name, taken in sizes[size].items() if name in allowed}
            if away[size] <= math.log(NEAR) and times:
                return times
        return {}

    def _fastest(self, shape: Shape, allowed: frozenset[str]) -> str | None:
        times = self.near(shape, allowed)
        return min(times, key=lambda name: (times[name], name), default=None)

    def winners(self, op: str, kind: tuple[str | int, ...], allowed: frozenset[str]) -> set[str]:
        """The kernels that are the fastest at some size, of all kinds that begin like this one."""
        start, found = " ".join(map(str, (op, *kind))) + " ", set()
        for family, sizes in self._times.items():
            for times in sizes.values() if f"{family} ".startswith(start) else ():
                if able := {name: taken for name, taken in times.items() if name in allowed}:
                    found.add(min(able, key=lambda name: (able[name], name)))
        return found

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Wanted]:
        """The shapes that ops ask for in the block, in the order in which they first do."""
        wanted: Wanted = {}
        self._wanted = wanted
        self.memo.clear()
        try:
            yield wanted
        finally:
            self._wanted = None
            self.memo.clear()

    def tune(
        self, wanted: Wanted, device: torch.device, seconds: float, clock: Callable[[Call, int], float] | None = None
    ) -> int:
        """Measures shapes that have no times of this machine yet, until `seconds` are spent, and keeps what it found.
        Returns how many. `clock` gives the microseconds of one call from so many.
        """
        deadline, done = time.monotonic() + seconds, 0
        for shape, candidates in wanted.items():
            if shape.size in self._own.get(shape.family, {}):
                continue
            if time.monotonic() >= deadline:
                logger.debug("no time left to tune %s of size %d and what follows it", shape.family, shape.size)
                break
            times = measure(candidates(shape, device), clock or cuda_clock)
            if times:
                self._take({shape.family: {shape.size: times}})
                done += 1
        if done and self._path is not None:
            write(self._path, self._own)
        return done

    @property
    def own(self) -> Mapping[str, Mapping[int, Times]]:
        """What was measured on this machine, now or at an earlier start."""
        return self._own

    def adopt(self, found: Mapping[str, Mapping[int, Times]]) -> None:
        """Takes another process's `own` in place of its own, so that both choose alike. It is not kept for later."""
        self._own = {}
        self._times = {family: dict(sizes) for family, sizes in self._shipped.items()}
        self._take(found)

    def _take(self, found: Mapping[str, Mapping[int, Times]]) -> None:
        for family, sizes in found.items():
            self._own.setdefault(family, {}).update(sizes)
            self._times.setdefault(family, {}).update(sizes)
        self.epoch += 1
        self._known.clear()
        self.memo.clear()


def choices(device: torch.device) -> Choices:
    """This process's choices for a CUDA device; "cuda" without an index is the current one."""
    return _choices(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _choices(index: int) -> Choices:
    card = torch.cuda.get_device_name(index)
    return Choices(shipped(card), kept_at(card))


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(candidates: Mapping[str, Call], clock: Callable[[Call, int], float]) -> Times:
    """Microseconds of each, the median of ROUNDS in which all take turns, so that none has the cooler GPU. Candidates
    that raise are left out.
    """
    running: dict[str, tuple[Call, int]] = {}
    for name, call in candidates.items():
        try:
            taken = clock(call, WARM_CALLS)
        except Exception as error:  # noqa: BLE001 - a kernel that fails here, for any reason, is not chosen
            logger.debug("%s does not run here and is not chosen: %s", name, error)
        else:
            running[name] = call, max(1, min(CALLS, math.ceil(ENOUGH / taken)))
    found: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(ROUNDS):
        for name, (call, calls) in running.items():
            found[name].append(clock(call, calls))
    return {name: round(statistics.median(times), 2) for name, times in found.items()}


def cuda_clock(call: Call, calls: int) -> float:
    """The time on the current device alone: it sleeps while the host starts the calls."""
    ahead = AHEAD
    while True:
        before, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        before.record()
        torch.cuda._sleep(ahead)
        start.record()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        started = 1e3 * (time.perf_counter() - began)
        end.record()
        end.synchronize()
        if started < before.elapsed_time(start) or ahead >= MOST_AHEAD:
            return 1e3 * float(start.elapsed_time(end)) / calls
        ahead *= 2


# --- files ------------------------------------------------------------------------------------------------------------


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def shipped(card: str, folder: Path = SHIPPED) -> dict[str, dict[int, Times]]:
    """The times that the package has for a GPU, in <card>.json and <card>_<family>.json; none for most."""
    found: dict[str, dict[int, Times]] = {}
    for path in [folder / f"{slug(card)}.json", *sorted(folder.glob(f"{slug(card)}_*.json"))]:
        found |= read(path)
    return found


def kept_at(card: str) -> Path:
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user that the system has no name for has no home
        root = Path(tempfile.gettempdir()) / f"omni_grpc-{os.getuid()}"
    versions = f"torch-{slug(torch.__version__)}_{slug(__version__)}"
    return root / "omni_grpc" / "tuning" / f"{slug(card)}_{versions}.json"


def read(path: Path) -> dict[str, dict[int, Times]]:
    """family -> size -> name -> microseconds. A file that cannot be read or parsed counts as missing: a warning names
    it, and it is rewritten after the next measurement.
    """
    try:
        return _parsed(read_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be used, so its shapes are measured again: %s", path, plain(error))
        return {}


def _parsed(document: Any) -> dict[str, dict[int, Times]]:
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    found: dict[str, dict[int, Times]] = {}
    for family, sizes in document.items():
        if not isinstance(sizes, dict):
            raise ValueError(f"{family!r} has no sizes")
        for size, times in sizes.items():
            fine = isinstance(times, dict) and all(isinstance(t, int | float) and t > 0 for t in times.values())
            if not fine or not size.isdecimal() or size == "0":
                raise ValueError(f"{family!r} has no times at {size!r}")
            found.setdefault(family, {})[int(size)] = {name: float(taken) for name, taken in times.items()}
    return found


def write(path: Path, own: Mapping[str, Mapping[int, Times]]) -> None:
    """Merges what was measured with what others have written since, and replaces the file atomically. Where the folder
    cannot be written, a warning says so and the next start measures again.
    """
    merged = read(path)
    for family, sizes in own.items():
        merged.setdefault(family, {}).update(sizes)
    text = json.dumps(merged, indent=1, sort_keys=True) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode())
    except (OSError, OmniError) as error:
        logger.warning("%s is not written, so the next start measures again: %s", path, plain(error))
