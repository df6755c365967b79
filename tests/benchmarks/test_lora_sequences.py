"""A sample of random sequences with adapters: a fixed seed, and one of its own for each run, which a failure prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.service import fuzz, lora_sequences

pytestmark = pytest.mark.service


@pytest.mark.parametrize("seed", [1, fuzz.fresh_seed()], ids=["fixed", "random"])
def test_no_image_is_wrong(seed: int) -> None:
    result = lora_sequences.run(Path(), lora_sequences.Numbers(count=25, seed=seed, clients=4, kills=1))
    assert not result.problems, f"seed {seed}: {result.problems}"
    assert result.figures["sequences"] == 25
    assert result.figures["images"] > 10
    assert result.figures["wrong_images"] == 0
