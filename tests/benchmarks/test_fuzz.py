"""A sample of bad input of every kind: a fixed seed, and one of its own for each run, which a failure prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.service import fuzz, fuzz_files, fuzz_media, fuzz_messages

pytestmark = pytest.mark.service

SEEDS = (1, fuzz.fresh_seed())


def test_requests_and_connections(tiny_qwen_image: Path) -> None:
    for seed, count, scenes in zip(SEEDS, (200, 100), (1, 0), strict=True):
        numbers = fuzz.Numbers(count=count, seed=seed, what=("wire",), connections=100, scenes=scenes)
        result = fuzz.measure({"image": (tiny_qwen_image, 1.0)}, numbers)
        assert not result.problems, f"seed {seed}: {result.problems}"
        assert sum(sum(answers.values()) for answers in result.figures["requests"].values()) >= count
        assert result.rows


@pytest.mark.parametrize("seed", SEEDS, ids=["fixed", "random"])
def test_media(seed: int) -> None:
    answers, problems = fuzz_media.fuzz(200, seed)
    assert not problems, f"seed {seed}: {problems}"
    outcomes = {outcome for _, outcome in answers}
    assert {"OK", "INVALID_ARGUMENT INPUT_UNREADABLE", "INVALID_ARGUMENT INPUT_TOO_LARGE"} <= outcomes


def test_files(tiny_qwen_image: Path) -> None:
    for seed in SEEDS:
        answers, problems = fuzz_files.fuzz(tiny_qwen_image, 15, seed)
        assert not problems, f"seed {seed}: {problems}"
        assert any(outcome == "INVALID_ARGUMENT BAD_LORA" for _, outcome in answers)


def test_a_case_is_the_same_in_every_run() -> None:
    known = fuzz_messages.Known(model="m", picture=bytes(10))
    for index in range(50):
        first, second = (fuzz_messages.case(3, index, known) for _ in range(2))
        assert (first.path, first.how, len(first.payloads)) == (second.path, second.how, len(second.payloads))


def test_every_rpc_is_asked() -> None:
    known = fuzz_messages.Known(model="m", picture=bytes(10))
    asked = {fuzz_messages.case(0, index, known).path for index in range(2000)}
    assert len(asked) == len(fuzz_messages.methods()) == 30
