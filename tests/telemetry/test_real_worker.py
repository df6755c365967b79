"""The figures of a server process with the bundled model, while it works and when its worker has died."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest

from omni_grpc.config import BUNDLED
from tests.server.process import served
from tests.telemetry.scraping import Figures, read

pytestmark = pytest.mark.service


def looked(address: str, good: Callable[[Figures], bool]) -> Figures:
    """The first figures that are good."""
    until = time.monotonic() + 120
    while True:
        with urlopen(f"{address}/metrics", timeout=30) as answer:
            figures = read(answer.read().decode())
        if good(figures):
            return figures
        assert time.monotonic() < until, "the figures that are waited for do not come"
        time.sleep(0.2)


def has(figures: Figures, name: str, **labels: str) -> bool:
    try:
        return figures.of(name, **labels) > 0
    except KeyError:
        return False


def test_the_figures_of_a_real_worker(tmp_path: Path) -> None:
    with served(BUNDLED, tmp_path, "--metrics-port", "0", "--restart-backoff", "0", "--device", "cpu") as process:
        (address,) = re.findall(r"metrics are at (\S+)/metrics", process.log.read_text())
        job = process.create(process.image(steps=200))
        busy = looked(address, lambda figures: has(figures, "omni_grpc_steps_total"))
        assert busy.of("omni_grpc_running_jobs", model=process.model) == 1
        assert busy.of("omni_grpc_running_rows") == 2, "one of the prompt and one of the negative prompt"
        process.watch(job)
        process.generate()
        figures = looked(address, lambda figures: has(figures, "omni_grpc_device_memory_used_bytes"))
        assert figures.of("omni_grpc_jobs_total", state="SUCCEEDED") == 2
        assert figures.of("omni_grpc_steps_total") == 204
        assert figures.of("omni_grpc_step_rows_sum") == 408
        assert figures.of("omni_grpc_step_pixels_total") == 204 * 64 * 64
        assert figures.of("omni_grpc_outputs_total", kind="image") == 2
        assert figures.of("omni_grpc_step_duration_seconds_count") == 204
        denoise = figures.of("omni_grpc_job_stage_seconds_sum", stage="denoise")
        assert 0 < figures.of("omni_grpc_step_measured_seconds_total") <= 1.05 * denoise
        assert figures.of("omni_grpc_step_predicted_seconds_total") > 0
        assert 1 << 26 < figures.of("omni_grpc_worker_resident_memory_bytes") < 1 << 34
        assert figures.of("omni_grpc_device_memory_used_bytes", device="cpu") < figures.of(
            "omni_grpc_device_memory_size_bytes", device="cpu"
        )
        (info,) = figures.labels("omni_grpc_model_info")
        assert (info["device"], info["dtype"]) == ("cpu", "float32")
        assert info["attention"]
        process.worker().kill()
        dead = looked(address, lambda figures: has(figures, "omni_grpc_worker_restarts_total", cause="WORKER_DIED"))
        assert dead.of("omni_grpc_worker_restarts_total") == 1
        assert process.stop()[0] == 0
