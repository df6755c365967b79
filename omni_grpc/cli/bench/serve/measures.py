"""What the records of a run say: percentiles, errors, and how many requests kept their objectives."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from omni_grpc.cli.bench.figures import quantile
from omni_grpc.cli.bench.serve.record import INTERRUPTED, Record
from omni_grpc.cli.bench.serve.slo import LENGTHS, TIMES, Slo, time_of

QUANTILES: Mapping[str, float] = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
LATE = 0.05
"""Seconds: a client whose requests are later than this in one of a hundred is too slow for the load."""
BUSY = 0.9
"""The share of a core above which the client, which has one thread, is too slow for the load."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Those of the run, and of the classes that have their own."""

    run: Slo
    classes: Mapping[str, Slo]

    def of(self, record: Record) -> Slo:
        return self.classes.get(record.klass, self.run)

    def met(self, record: Record) -> bool:
        return self.of(record).met(record)


def summary(
    records: Sequence[Record], objectives: Objectives, *, offered: float | None, client_cpu: float
) -> dict[str, Any]:
    """Figures of a run and of each class in it. Latencies count from when a request was to be sent, and are of those
    that succeeded. `offered`: requests per second that were to be sent; `client_cpu`: cores that this process took.
    """
    counted = [record for record in records if record.outcome != INTERRUPTED]
    begin = min((record.scheduled for record in records), default=0.0)
    seconds = max((record.ended or 0.0 for record in records), default=0.0) - begin
    sent = sorted(record.sent for record in records if record.sent is not None)
    found = _figures(counted, objectives, seconds)
    found |= {
        "interrupted": len(records) - len(counted),
        "seconds": seconds,
        "offered_per_second": offered,
        "sent_per_second": (len(sent) - 1) / (max(sent) - min(sent))
        if len(sent) > 1 and max(sent) > min(sent)
        else None,
        "client_late": spread([record.late for record in records]),
        "client_cpu_cores": client_cpu,
    }
    names = dict.fromkeys(record.klass for record in sorted(records, key=lambda record: record.number))
    found["classes"] = {
        name: _figures([record for record in counted if record.klass == name], objectives, seconds) for name in names
    }
    return found


def late(found: Mapping[str, Any]) -> str:
    """Why the figures of a run say more of the client than of the server; empty where they do not."""
    lateness, cpu = found["client_late"], found["client_cpu_cores"]
    if lateness is not None and lateness["p99"] > LATE:
        return (
            f"the client sent requests late, by {1000 * lateness['p99']:.0f} ms or more for 1 of 100: latencies count "
            "from when they were to be sent, so its own delay is in them; run it on another machine, or several of it"
        )
    if cpu > BUSY:
        return f"the client took {cpu:.2f} cores, all that it can use: run it on a faster machine, or several of it"
    return ""


def kept_up(records: Sequence[Record]) -> bool:
    """Whether a server served requests about as fast as they came: after the last one was due, it took no longer than
    they had come for, or than twice the fastest. Objectives may be so wide that a short run keeps them at any rate.
    """
    due = [record.scheduled for record in records]
    ended = [record.ended for record in records if record.ended is not None]
    fastest = min((time for record in records if (time := time_of(record, "e2e")) is not None), default=0.0)
    return not ended or max(ended) - max(due) <= max(max(due) - min(due), 2 * fastest)


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Quantiles (nearest rank), mean, standard deviation, least and most; None of nothing."""
    if not values:
        return None
    return {
        "count": len(values),
        **{name: quantile(values, q) for name, q in QUANTILES.items()},
        "mean": statistics.fmean(values),
        "stddev": statistics.pstdev(values),
        "min": min(values),
        "max": max(values),
    }


def _figures(records: Sequence[Record], objectives: Objectives, seconds: float) -> dict[str, Any]:
    good = [record for record in records if record.succeeded]
    met = sum(objectives.met(record) for record in records)
    span = seconds if seconds > 0 else math.inf
    errors = Counter(why(it) for it in records if not it.succeeded)
    times = {name: [time_of(record, name) for record in good] for name in (*TIMES, *LENGTHS) if name != "step_gap"}
    return {
        "requests": len(records),
        "succeeded": len(good),
        "errors": dict(errors.most_common()),
        "retries": sum(record.retries for record in records),
        "resumes": sum(record.resumes for record in records),
        "completed_per_second": len(good) / span,
        "goodput_per_second": met / span,
        "met": met,
        "attainment": met / len(records) if records else None,
        "attainment_by": _each(records, objectives),
        "latency": {name: spread([it for it in its if it is not None]) for name, its in times.items()},
        "step_gap": spread([gap for record in good for gap in record.gaps]),
        "steps_left_out": sum(record.coalesced for record in records),
        "jobs_sharing_steps": statistics.fmean([record.sharing for record in good]) if good else None,
    }


def why(record: Record) -> str:
    """The code and the reason of a request that failed; a reason that only repeats the code says nothing more."""
    return " ".join(dict.fromkeys(part for part in (record.code, record.reason) if part))


def _each(records: Sequence[Record], objectives: Objectives) -> dict[str, float]:
    """Objective -> the share of the requests which have it that kept it; a request that failed kept none."""
    total, kept = Counter[str](), Counter[str]()
    for record in records:
        one = objectives.of(record)
        for name in one.limits:
            total[name] += 1
            kept[name] += record.succeeded and one.kept(name, record)
    return {name: kept[name] / total[name] for name in total}
