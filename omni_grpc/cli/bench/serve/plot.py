"""Plots of a load test, as PNG. matplotlib is an extra, loaded where a plot is asked for."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import Any

from omni_grpc.types.errors import ConfigError, Violation

SHOWN: Mapping[str, str] = {"p50": "#4c72b0", "p95": "#dd8452", "p99": "#c44e52"}
"""Percentile -> its color."""
GROUND, LINES = "#ffffff", "#cccccc"


def check_plot() -> None:
    """Raises ConfigError where nothing can be plotted: before the run and not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        rule = "needs matplotlib, which is not installed: pip install 'omni-grpc[plot]'"
        raise ConfigError(f"--plot {rule}", violations=(Violation("plot", rule),))


def plot(runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> bytes:
    """A PNG. `runs`: the points of each load test, as in the JSON, under a label. Several points are drawn over their
    rates; a single one as the share of requests that had ended by each time, with the queue of the server beside it.
    """
    from matplotlib.figure import Figure

    several = any(len(points) > 1 for points in runs.values())
    figure = Figure(figsize=(10, 4), dpi=110, facecolor=GROUND, layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (label, points) in enumerate(runs.items()):
        style = ("-", "--", ":", "-.")[number % 4]
        (_curve if several else _single)(left, right, label if len(runs) > 1 else "", points, style)
    for axes in (left, right):
        axes.grid(color=LINES, linewidth=0.5)
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _curve(left: Any, right: Any, label: str, points: Sequence[Mapping[str, Any]], style: str) -> None:
    ordered = [point for point in sorted(points, key=lambda it: it["rate"]) if point["summary"]["latency"]["e2e"]]
    rates = [point["rate"] for point in ordered]
    for name, color in SHOWN.items():
        values = [point["summary"]["latency"]["e2e"][name] for point in ordered]
        left.plot(rates, values, style, color=color, marker="o", markersize=3, label=f"{name} {label}".strip())
    left.set(xlabel="requests per second, offered", ylabel="end to end, seconds", yscale="log")
    for name, color in (("completed_per_second", "#4c72b0"), ("goodput_per_second", "#55a868")):
        shown = f"{name.partition('_')[0]} {label}".strip()
        right.plot(
            rates, [it["summary"][name] for it in ordered], style, color=color, marker="o", markersize=3, label=shown
        )
    if not label or style == "-":
        right.plot(rates, rates, color=LINES, label="offered")
    right.set(xlabel="requests per second, offered", ylabel="requests per second")


def _single(left: Any, right: Any, label: str, points: Sequence[Mapping[str, Any]], style: str) -> None:
    for point in points:
        ended = [it["ended"] - it["scheduled"] for it in point["requests"] if it["outcome"] == "succeeded"]
        shares = [(place + 1) / len(ended) for place in range(len(ended))]
        left.step(sorted(ended), shares, style, where="post", label=label or point["label"])
        for name in ("queued", "running"):
            shown = f"{name} {label}".strip()
            right.plot(
                [it["time"] for it in point["samples"]], [it[name] for it in point["samples"]], style, label=shown
            )
    left.set(xlabel="end to end, seconds", ylabel="share of the requests")
    right.set(xlabel="seconds", ylabel="jobs on the server")
