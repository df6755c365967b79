"""What the runner tells of caches: rows counted once a step, evaluations one by one, failed forwards not at all."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from omni_grpc.nn.rows import Rows
from omni_grpc.types.step_cache import CacheCount, tally
from omni_grpc.worker.packed import PackedRunner
from tests.worker.test_segments import Chunks, request


class Answering(Chunks):
    """Two denoisers with caches: one answers every second evaluation of output 0, the other one computes all."""

    def __init__(self, scheduler: str, bad: str = "") -> None:
        super().__init__(scheduler, segments=1)
        self.bad = bad

    def predict(self, batch: Rows) -> Tensor:
        for state, branch in batch.owners:
            hit = state.output == 0 and state.evaluation % 2 == 1
            for component, count in (
                ("first", CacheCount(component="first", hits=int(hit), misses=int(not hit), measured=1, change=0.5)),
                ("second", CacheCount(component="second", misses=1)),
            ):
                tally(state.reports, (component, branch), count)
        if self.bad in {state.request.id for state, _ in batch.owners}:
            raise RuntimeError("out of numbers")
        return super().predict(batch)


def runner(pipeline: Chunks) -> PackedRunner:
    return PackedRunner(pipeline, torch.device("cpu"), "omni-test-reuse-")


def test_a_row_that_is_answered_in_one_of_two_evaluations_counts_once() -> None:
    it = runner(Answering("FlowMatchHeunDiscreteScheduler"))
    it.prepare(request(3, outputs=2))
    steps = []
    while not steps or not steps[-1].finished:
        steps += it.step(("job",)).progress
    assert [(step.evals, step.rows, step.reports.rows_reused) for step in steps] == [(2, 2, 1), (2, 2, 1), (1, 2, 0)]
    assert [step.reports.cache for step in steps[:2]] == [
        (
            CacheCount(component="first", hits=1, misses=3, measured=4, change=2.0),
            CacheCount(component="second", misses=4),
        )
    ] * 2
    assert steps[2].reports.cache == (
        CacheCount(component="first", misses=2, measured=2, change=1.0),
        CacheCount(component="second", misses=2),
    )


def test_a_forward_that_fails_for_a_neighbour_is_not_counted() -> None:
    it = runner(Answering("FlowMatchEulerDiscreteScheduler", bad="bad"))
    for name in ("job", "bad"):
        it.prepare(dataclasses.replace(request(3), id=name))
    report = it.step(("job", "bad"))
    assert [broken.id for broken in report.broken] == ["bad"]
    (progress,) = report.progress
    assert [(count.hits, count.misses) for count in progress.reports.cache] == [(0, 1), (0, 1)]
    (progress,) = it.step(("job",)).progress
    assert [(count.component, count.hits, count.misses) for count in progress.reports.cache] == [
        ("first", 1, 0), ("second", 0, 1)
    ]  # fmt: skip
    assert progress.reports.rows_reused == 1
