"""How late the page of the HTTP port shows a step: from the step's event, by the server's clock, to the frame in which
Chromium shows its preview, by the clock of the same machine.

The worker sleeps for each step and makes a preview of 256 pixels, so that steps come at an even rate. The page is
that of the package, in a Chromium without a window; it shows the picture, step, noise level and time left of a job.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_grpc.cli.bench.figures import quantile

from .lives import QUICK, started
from .quick_worker import STEP
from .report import Result

LISTENS = re.compile(r"HTTP listens on (http\S+)")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WATCH = """
    window.late = [];
    addEventListener("drawn", ({ detail }) => requestAnimationFrame(() => {
        // a task of its own comes after the frame was handed over
        const { port1, port2 } = new MessageChannel();
        port1.onmessage = () => window.late.push(Date.now() - detail);
        port2.postMessage(null);
    }));
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """For each number of `jobs` at a time, each takes `steps` of `step_seconds`."""

    jobs: tuple[int, ...] = (1, 10)
    steps: int = 200
    step_seconds: float = 0.05


def run(checkpoint: Path) -> Result:
    return measure(Numbers())


def measure(numbers: Numbers) -> Result:
    rows: list[tuple[str, ...]] = []
    figures: dict[str, Any] = {"numbers": dataclasses.asdict(numbers)}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with started(QUICK, ("--http-port", "0"), log, {STEP: str(numbers.step_seconds)}):
            found = LISTENS.search(log.read_text())
            if found is None:
                raise RuntimeError(f"the server has no HTTP port: {log.read_text()[-2000:]}")
            for jobs in numbers.jobs:
                late = _shown(found[1], jobs, numbers.steps)
                if len(late) < jobs * numbers.steps / 10:
                    problems.append(f"{jobs} jobs: {len(late)} of {jobs * numbers.steps} steps were seen")
                    continue
                rows.append((str(jobs), str(len(late)), *(f"{value:.0f} ms" for value in _quantiles(late))))
                p50, p95, most = _quantiles(late)
                figures[f"{jobs} jobs"] = {"shown": len(late), "p50_ms": p50, "p95_ms": p95, "max_ms": most}
    return Result(
        columns=("jobs at a time", "steps shown", "event to picture, median", "p95", "most"),
        rows=rows,
        figures=figures,
        problems=problems,
    )


def _quantiles(late: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(late), quantile(late, 0.95), max(late)


def _shown(url: str, jobs: int, steps: int) -> list[float]:
    """Milliseconds from event to picture, of each step that was shown. Raises RuntimeError where no Chromium is."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise RuntimeError(f"none of {', '.join(BROWSERS)} is installed")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=flags) as browser:
        page = browser.new_page()
        page.add_init_script(WATCH)
        page.goto(url)
        page.get_by_label("Prompt", exact=True).fill("a red circle")
        page.get_by_label("Steps", exact=True).fill(str(steps))
        send = page.get_by_role("button", name="Generate", exact=True)
        for _ in range(jobs):
            send.and_(page.locator("[aria-disabled=false]")).click()
        page.wait_for_function(
            "jobs => document.querySelectorAll('[data-phase=done]').length >= jobs", arg=jobs, timeout=600_000
        )
        late: list[float] = page.evaluate("window.late")
        return late
