"""What the benchmark of ranks' memory counts: bytes that one process has once are spread, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.bench_rank_memory import Held, line, on_ranks, ways
from omni_grpc.types.ranks import ParallelSizes
from tools.tiny_checkpoints import BUILDERS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS["qwen_image"](tmp_path_factory.mktemp("models") / "qwen", heads=4, head_dim=32, layers=4)


def test_sharded_weights_are_spread_evenly(model: Path) -> None:
    every = [ParallelSizes(), ParallelSizes(sequence_parallel_size=2, use_hsdp=True)]
    (alone,), sharded = on_ranks(model, "cpu", every)
    assert len(sharded) == 2
    assert 0 < alone.of_blocks < alone.weights
    # the rest of the model is whole, except that the first rank alone has the text encoder
    encoder = sum(
        tensor.nbytes for file in (model / "text_encoder").glob("*.safetensors") for tensor in load_file(file).values()
    )
    rest = alone.weights - alone.of_blocks
    first, second = (rank.weights - rank.of_blocks for rank in sharded)
    assert first == pytest.approx(rest, rel=0.02)
    # the file has parts that nothing reads
    assert encoder / 3 < rest - second <= encoder
    for rank in sharded:
        # parts are padded to multiples of 16 bytes
        assert rank.of_blocks == pytest.approx(alone.of_blocks / 2, rel=0.02)
        assert rank.step > 0


def test_every_way_is_a_line() -> None:
    held = Held(4 << 20, 3 << 20, 2 << 20, 1 << 20)
    lines = [line(way, [held] * sizes.world) for way, sizes in ways([1, 2, 4])]
    assert [line.split()[-5:] for line in lines] == [
        [str(ranks), "4.0", "3.0", "2.0", "1.0"] for ranks in (1, 2, 4, 2, 4, 4)
    ]
