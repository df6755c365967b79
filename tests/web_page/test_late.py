"""The benchmark of the page runs, with numbers far too small to measure anything. No assertion is about speed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from benchmarks.service import page


def test_the_benchmark_of_the_page_runs(browser):
    # a browser driver wants a thread to itself
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(page.measure, page.Numbers(jobs=(2,), steps=40, step_seconds=0.03)).result()
    assert not result.problems
    ((jobs, shown, *_),) = result.rows
    assert jobs == "2"
    assert 0 < int(shown) <= 80
    assert 0 < result.figures["2 jobs"]["p50_ms"] <= result.figures["2 jobs"]["p95_ms"]
