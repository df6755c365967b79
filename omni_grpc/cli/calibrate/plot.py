"""The curve of a calibration, as PNG. matplotlib is an extra, loaded where a plot is asked for."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

COLORS: Mapping[str, str] = {
    "tea_cache": "#4c72b0",
    "first_block": "#dd8452",
    "cache_dit": "#55a868",
    "mag_cache": "#c44e52",
    "sea_cache": "#8172b3",
}
"""Method -> its color."""


def plot(points: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """A PNG: each point of the JSON by how many times fewer blocks ran and its PSNR, and a line through those of a
    method that none of it beats.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), dpi=110, facecolor="#ffffff", layout="constrained")
    axes = figure.subplots()
    for method, color in COLORS.items():
        mine = sorted((1 / it["blocks_run"], it["psnr_median"]) for it in points if it["method"] == method)
        if mine:
            axes.plot(*zip(*mine, strict=True), "o", color=color, markersize=3, alpha=0.5)
        best: list[tuple[float, float]] = []
        for fewer, psnr in reversed(mine):
            if not best or psnr > best[-1][1]:
                best.append((fewer, psnr))
        if best:
            axes.plot(*zip(*best, strict=True), "-", color=color, label=method)
    axes.set(xlabel="times fewer blocks", ylabel="PSNR, dB (median)", title=title)
    axes.grid(color="#cccccc", linewidth=0.5)
    axes.legend(fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
