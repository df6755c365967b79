"""What ranks are asked to measure."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch

from benchmarks import bench_models, bench_overlap
from tests.parallel.jobs import Ranked, device_of

REPETITIONS = 2
"""Of each side."""


def benchmark(mesh: Ranked, model: str, ways: Sequence[str]) -> list[bench_overlap.Measurement]:
    """What benchmarks.bench_overlap measures of a tiny model, on all processes."""
    cases = [case for case in bench_overlap.tiny_cases() if case.name == model]
    with (
        mock.patch.object(bench_models, "DEVICE", device_of(mesh)),
        mock.patch.object(bench_models, "DTYPE", torch.float32),
        mock.patch.object(bench_overlap, "REPETITIONS", REPETITIONS),
    ):
        return list(bench_overlap.measure(cases, ways, 1e6))
