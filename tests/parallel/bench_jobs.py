"""What ranks are asked to measure."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch

from benchmarks import bench_models, bench_overlap
from tests.parallel.jobs import Ranked

REPETITIONS = 2
"""Of each side."""


def benchmark(mesh: Ranked, ways: Sequence[str]) -> list[bench_overlap.Measurement]:
    """What benchmarks.bench_overlap measures of tiny models, on all processes."""
    with (
        mock.patch.object(bench_models, "DEVICE", torch.device("cpu")),
        mock.patch.object(bench_models, "DTYPE", torch.float32),
        mock.patch.object(bench_overlap, "REPETITIONS", REPETITIONS),
    ):
        return list(bench_overlap.measure(bench_overlap.tiny_cases(), ways, 1e6))
