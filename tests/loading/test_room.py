"""Weights of layers that have a place of their own for them on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from omni_grpc import ops
from omni_grpc.loading.checkpoint import WEIGHT_FILE, load_weights
from omni_grpc.nn.linear import Linear
from omni_grpc.ops.host import HostLibraryError, Reading, Region
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.spec import WeightMap

MAP = WeightMap(fused={"both": ("one", "two")}, float32=(r"^precise",))


class Roomy(Linear):
    """Has room in a region, and keeps what it takes."""

    def __init__(self, out_features: int, region: Region) -> None:
        with torch.device("meta"):
            super().__init__(24, out_features, stream="img")
        self.region = region

    def staging_buffer(self, name: str, dtype: torch.dtype) -> Tensor | None:
        return self.region.take(self.shapes()[name], dtype)


def load(folder: Path, dtype: torch.dtype, region: Region) -> nn.Module:
    module = nn.ModuleDict(
        {"both": Roomy(40, region), "precise": Roomy(8, region), "plain": Linear(24, 4, stream="img")}
    )
    load_weights(module, folder, MAP, device="cpu", dtype=dtype)
    return module


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Tensor]:
    made = {}
    for name, rows in {"one": 16, "two": 24, "precise": 8, "plain": 4}.items():
        made[f"{name}.weight"], made[f"{name}.bias"] = torch.randn(rows, 24), torch.randn(rows)
    safetensors.torch.save_file(made, tmp_path / WEIGHT_FILE, metadata={"format": "pt"})
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_end_in_the_room_and_are_read_there_where_they_need_no_conversion(
    dtype: torch.dtype, weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    add = Reading.add
    monkeypatch.setattr(Reading, "add", lambda self, *piece: read.append(piece[2].nbytes) or add(self, *piece))
    region = Region(1 << 20)
    module = load(tmp_path, dtype, region)
    for leaf in ("weight", "bias"):
        both, precise = getattr(module["both"], leaf), getattr(module["precise"], leaf)
        assert torch.equal(both, torch.cat([weights[f"one.{leaf}"], weights[f"two.{leaf}"]]).to(dtype))
        assert torch.equal(precise, weights[f"precise.{leaf}"])
        assert torch.equal(getattr(module["plain"], leaf), weights[f"plain.{leaf}"].to(dtype))
        assert region.offset(both) is not None
        assert region.offset(getattr(module["plain"], leaf)) is None
    kept = [4 * 8 * 24, 4 * 8]
    parts = [*kept, 4 * 16 * 24, 4 * 16, 4 * 24 * 24, 4 * 24] if dtype == torch.float32 else kept
    assert sorted(read) == (sorted(parts) if ops.load_native().loaded else [])


def test_a_file_that_cannot_be_read_is_the_checkpoints_failure(
    weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Reading, threads: int = 1) -> None:
        raise HostLibraryError("part.safetensors: Input/output error")

    monkeypatch.setattr(Reading, "run", fail)
    with pytest.raises(CheckpointError, match=r"cannot be read: part\.safetensors: Input/output error"):
        load(tmp_path, torch.float32, Region(1 << 20))
