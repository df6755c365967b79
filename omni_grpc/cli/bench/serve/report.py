"""What a load test prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omni_grpc.cli.bench.serve.measures import QUANTILES, late
from omni_grpc.cli.bench.serve.session import Point

NAMES: Mapping[str, str] = {
    "first_event": "first event",
    "queued": "queued",
    "started": "started",
    "first_step": "first step",
    "first_preview": "first preview",
    "e2e": "end to end",
    "queue": "time in the queue",
    "step_gap": "between two steps",
}
"""The times that are printed, in order."""
CURVE = (
    *("RATE", "SENT/S", "DONE/S", "GOODPUT/S", "SLO", "E2E P50", "E2E P95", "E2E P99", "FIRST EVENT P99"),
    *("QUEUE P95", "STEP GAP P99", "QUEUED", "FAILED"),
)
"""The columns of a table of rates."""

Table = list[tuple[str, ...]]


def lines(point: Point) -> Iterator[str]:
    """A point in words, before its tables."""
    found, server = point.summary, point.sampled.summary()
    offered = "" if found["offered_per_second"] is None else f"{found['offered_per_second']:.3g}/s offered, "
    yield (
        f"{point.label}: {found['succeeded']} of {found['requests']} requests succeeded in {found['seconds']:.1f} s: "
        f"{offered}{found['completed_per_second']:.3g}/s done, {found['goodput_per_second']:.3g}/s within objectives"
    )
    if found["attainment"] is not None:
        each = ", ".join(f"{name} {share:.1%}" for name, share in found["attainment_by"].items())
        yield f"objectives kept: {found['attainment']:.1%}" + (f" ({each})" if each else "")
    for what, count in found["errors"].items():
        yield f"failed with {what}: {count}"
    if found["interrupted"]:
        yield f"interrupted: {found['interrupted']}"
    if found["retries"] or found["resumes"] or found["steps_left_out"]:
        yield f"retries {found['retries']}, resumes {found['resumes']}, step events left out {found['steps_left_out']}"
    if server["samples"]:
        error = (
            ""
            if server["cost_error_median"] is None
            else f", steps took {server['cost_error_median']:.2f} of predicted"
        )
        yield (
            f"server: {server['queued_max']} queued at most, {server['running_mean']:.1f} running and "
            f"{server['rows_mean']:.1f} rows on average{error}"
        )
    if server["failed"]:
        yield f"the server's load is not known: {server['failed']}"
    if late(found):
        yield f"warning: {late(found)}"


def times(found: Mapping[str, Any]) -> Table:
    """Percentiles of each time, with a head."""
    rows = []
    for name, title in NAMES.items():
        spread = found["step_gap"] if name == "step_gap" else found["latency"][name]
        if spread is not None:
            values = (*(spread[q] for q in QUANTILES), spread["max"], spread["mean"], spread["stddev"])
            rows.append((title, *map(seconds, values)))
    return [("TIME", *(name.upper() for name in QUANTILES), "MOST", "MEAN", "STDDEV"), *rows]


def classes(found: Mapping[str, Any]) -> Table:
    """A row for each class, with a head."""
    head = ("CLASS", "REQUESTS", "FAILED", "SLO", "E2E P50", "E2E P95", "E2E P99", "STEP GAP P99")
    rows = []
    for name, its in found["classes"].items():
        e2e, gap = its["latency"]["e2e"], its["step_gap"]
        rows.append(
            (
                name,
                str(its["requests"]),
                str(its["requests"] - its["succeeded"]),
                "-" if its["attainment"] is None else f"{its['attainment']:.1%}",
                *(seconds(e2e and e2e[q]) for q in QUANTILES),
                seconds(gap and gap["p99"]),
            )
        )
    return [head, *rows]


def curve(points: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each rate, from the lowest to the highest, with a head. `points` as in the JSON."""
    rows = []
    for point in sorted(points, key=lambda point: point["rate"] or 0.0):
        found, queued = point["summary"], point["server"].get("queued_max")
        latency, gap = found["latency"], found["step_gap"]
        rows.append(
            (
                point["label"],
                "-" if found["sent_per_second"] is None else f"{found['sent_per_second']:.3g}",
                f"{found['completed_per_second']:.3g}",
                f"{found['goodput_per_second']:.3g}",
                "-" if found["attainment"] is None else f"{found['attainment']:.1%}",
                *(seconds(latency["e2e"] and latency["e2e"][q]) for q in QUANTILES),
                seconds(latency["first_event"] and latency["first_event"]["p99"]),
                seconds(latency["queue"] and latency["queue"]["p95"]),
                seconds(gap and gap["p99"]),
                "-" if queued is None else str(queued),
                str(found["requests"] - found["succeeded"]),
            )
        )
    return [CURVE, *rows]


def saturation(found: Mapping[str, Any]) -> str:
    """The result of a search."""
    if found["rate"] is None:
        return f"no rate that was tried keeps the objectives of {found['target']:.0%} of the requests"
    above = "no higher rate was tried" if found["above"] is None else f"{found['above']:.3g}/s is too much"
    return f"{found['rate']:.3g}/s keep the objectives of {found['target']:.0%} of the requests; {above}"


def seconds(value: float | None) -> str:
    """Three digits, in the unit that fits."""
    if value is None:
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
