"""Files that PEFT itself writes: what is made of a layer's weight is what PEFT merges, kind by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omni_grpc.loading.adapters import read_adapter
from omni_grpc.loading.adapters.binding import bind
from omni_grpc.loading.adapters.deltas import Bias, Dense, Kron, LowRank, Vector

peft = pytest.importorskip("peft")

LAYERS = {"first": (24, 16), "second": (16, 24)}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


CONFIGS: dict[str, Any] = {
    "DoRA": lambda: peft.LoraConfig(r=4, lora_alpha=6, use_dora=True, target_modules=list(LAYERS)),
    "DoRA of rsLoRA": lambda: peft.LoraConfig(
        r=4, lora_alpha=6, use_dora=True, use_rslora=True, target_modules=list(LAYERS)
    ),
    "OFT": lambda: peft.OFTConfig(oft_block_size=8, use_cayley_neumann=False, target_modules=list(LAYERS)),
    "OFT by a series": lambda: peft.OFTConfig(oft_block_size=4, r=0, target_modules=list(LAYERS)),
    "OFT of few terms": lambda: peft.OFTConfig(
        oft_block_size=4, r=0, num_cayley_neumann_terms=3, target_modules=list(LAYERS)
    ),
    "OFT with one block": lambda: peft.OFTConfig(oft_block_size=8, block_share=True, target_modules=list(LAYERS)),
    "bounded OFT": lambda: peft.OFTConfig(oft_block_size=8, coft=True, eps=0.1, target_modules=list(LAYERS)),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=8, target_modules=list(LAYERS)),
    "LoHa of high rank": lambda: peft.LoHaConfig(r=20, alpha=10, target_modules=list(LAYERS)),
    "LoKr": lambda: peft.LoKrConfig(r=2, alpha=4, target_modules=list(LAYERS)),
}


def written(name: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before, and those that PEFT merges into them from the file that it has written."""
    torch.manual_seed(4)
    base = Layers().requires_grad_(False)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    model = peft.get_peft_model(base, CONFIGS[name]())
    generator = torch.Generator().manual_seed(5)
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            moved = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data = parameter.data.abs() + moved.abs() if "magnitude" in key else parameter.data + moved
    model.save_pretrained(folder)
    return before, model.merge_and_unload().state_dict()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_merged_weight_is_the_one_that_peft_merges(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a CUDA extension that it would try to compile
    monkeypatch.setattr("peft.tuners.boft.layer.get_fbd_cuda", lambda: None)
    before, expected = written(name, tmp_path)
    bound = bind("a", read_adapter("a", tmp_path), "transformer", LAYERS, components=("transformer",))
    bound.check("a")
    assert bound.skipped == {}
    changed = set()
    for change in bound.changes:
        (part,) = change.parts
        weight, delta = before[f"{part.module}.weight"], change.delta
        assert not isinstance(delta, Bias | Vector)
        if isinstance(delta, LowRank | Kron | Dense):
            made = weight + change.scale * delta.dense()
        else:
            made = delta.merged(weight, change.scale)
        torch.testing.assert_close(made, expected[f"{part.module}.weight"], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(made, weight, atol=1e-2)
        changed.add(part.module)
    assert changed == set(LAYERS)
