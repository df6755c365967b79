"""Service level objectives: which times of a request are promised, and whether it kept them."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping

from omni_grpc.cli.bench.serve.record import Record
from omni_grpc.config.command_line import meant

TIMES: Mapping[str, str] = {
    "first_event": "the first event of the job",
    "queued": "the event queued",
    "started": "the event started: the job has left the queue",
    "first_step": "the first denoising step",
    "first_preview": "the first preview",
    "e2e": "the end of the job, with all bytes of its outputs",
}
"""Times that count from when a request was to be sent."""
LENGTHS: Mapping[str, str] = {
    "queue": "the time in the queue, as the server says",
    "step_gap": "the longest time between two step events",
}
"""Other times of a request."""
_UNITS: Mapping[str, float] = {"ms": 0.001, "s": 1.0, "min": 60.0}
_EXPECTED = "expected NAME=TIME,..., for example e2e=10s,first_event=200ms"


@dataclasses.dataclass(frozen=True, slots=True)
class Slo:
    """Name of a time -> the most seconds that it may take. Without any, every request that succeeds keeps it."""

    limits: Mapping[str, float]

    def met(self, record: Record) -> bool:
        """Whether the request succeeded, and each time kept its limit. A time that never came did not."""
        return record.succeeded and all(self.kept(name, record) for name in self.limits)

    def kept(self, name: str, record: Record) -> bool:
        """Whether one of the times kept its limit."""
        taken = time_of(record, name)
        return taken is not None and taken <= self.limits[name]

    def __str__(self) -> str:
        return ",".join(f"{name}={limit:g}s" for name, limit in self.limits.items())


def time_of(record: Record, name: str) -> float | None:
    """Seconds of one of TIMES or LENGTHS; None where the request did not come that far."""
    if name == "queue":
        return record.queue_wait
    if name == "step_gap":
        return max(record.gaps, default=None)
    at: float | None = getattr(record, "ended" if name == "e2e" else name)
    return None if at is None else at - record.scheduled


def slo(text: str) -> Slo:
    """The type of --slo. Raises ArgumentTypeError for what is none."""
    limits = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|min)", value)
        if name not in (*TIMES, *LENGTHS) and equals:
            known = (*TIMES, *LENGTHS)
            raise argparse.ArgumentTypeError(f"has {name!r}, expected one of {', '.join(known)}{meant(name, known)}")
        if match is None or not equals:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is no objective: {_EXPECTED}")
        limits[name] = float(match[1]) * _UNITS[match[2]]
        if not 0 < limits[name] < math.inf:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} leaves no time")
    return Slo(limits)
