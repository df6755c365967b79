"""The parallel single-stream block and the dual-stream block of FLUX.1, against those of diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from torch import Tensor, nn

from omni_grpc.loading.checkpoint import WEIGHT_FILE, load_weights
from omni_grpc.models.flux import TRANSFORMER_WEIGHTS
from omni_grpc.nn.dual_stream import DualStreamBlock
from omni_grpc.nn.parallel_single import ParallelSingleBlock
from omni_grpc.nn.rows import JOINT, LayoutCache, Row, Rows
from omni_grpc.nn.stack import Stack

SIZES = ((9, 16), (5, 48), (12, 1), (0, 7))
"""Tokens of text and picture of each row."""


@pytest.fixture
def pair(tmp_path: Path) -> tuple[nn.ModuleDict, Stack]:
    """One block of each kind, diffusers' and ours with the same weights; no norm is like another."""
    torch.manual_seed(0)
    shape = {"dim": 64, "num_attention_heads": 2, "attention_head_dim": 32}
    theirs = nn.ModuleDict(
        {
            "transformer_blocks": nn.ModuleList([FluxTransformerBlock(**shape)]),
            "single_transformer_blocks": nn.ModuleList([FluxSingleTransformerBlock(**shape)]),
        }
    )
    theirs = theirs.eval().requires_grad_(False)
    for name, weight in theirs.named_parameters():
        if ".attn.norm" in name:
            weight += 0.3 * torch.randn_like(weight)
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / WEIGHT_FILE)
    ours = nn.Module()
    ours.stack = Stack(dual=[DualStreamBlock(2, 32)], single=[ParallelSingleBlock(2, 32)])
    load_weights(ours, tmp_path, TRANSFORMER_WEIGHTS, device="cpu", dtype=torch.float32)
    return theirs, ours.stack


def oracle(blocks: nn.ModuleDict, txt: Tensor, img: Tensor, temb: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """One row through both blocks: the rotary table as diffusers has it, each value twice."""
    table = tuple(part.repeat_interleave(2, -1) for part in rope.unbind(-1))
    txt, img = txt[None], img[None]
    for group in blocks.values():
        txt, img = group[0](img, txt, temb, table)
    return txt[0], img[0]


def test_unlike_rows_get_what_diffusers_gives_each_alone(pair: tuple[nn.ModuleDict, Stack]) -> None:
    theirs, stack = pair
    generator = torch.Generator().manual_seed(1)
    rows = Rows([(None, "cond")] * len(SIZES), [Row.of(txt=txt, img=img) for txt, img in SIZES], LayoutCache("cpu"))
    carry = {name: torch.randn(rows.stream(name).total, 64, generator=generator) for name in ("txt", "img")}
    temb = torch.randn(len(SIZES), 64, generator=generator)
    angle = torch.randn(rows.stream(JOINT).total, 16, generator=generator)
    rope = torch.stack([angle.cos(), angle.sin()], -1)
    rows.bind("rope", JOINT, rows.stream(JOINT).split(rope))
    for name, table in stack.modulation(nn.functional.silu(temb)).items():
        rows.bind(name, "mod", table.split(1))
    out = stack(carry, rows)
    for row in range(len(SIZES)):
        mine = [out[name][rows.stream(name).slice(row)] for name in ("txt", "img")]
        parts = (carry[name][rows.stream(name).slice(row)] for name in ("txt", "img"))
        expected = oracle(theirs, *parts, temb[row : row + 1], rope[rows.stream(JOINT).slice(row)])
        for got, wanted in zip(mine, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_a_token_is_modulated_by_its_own_level() -> None:
    """A row with two levels is two rows in which every token has one of them, put together, where nothing attends."""
    generator = torch.Generator().manual_seed(2)
    block = ParallelSingleBlock(num_heads=2, head_size=32).requires_grad_(False)
    block.attn.to_qkv.weight.zero_()
    x = torch.randn(9, 64, generator=generator)
    mod = block.modulation(torch.randn(2, 64, generator=generator))

    def run(row: Row, mod: Tensor) -> Tensor:
        rows = Rows([(None, "cond")], [row], LayoutCache("cpu"))
        rows.bind("rope", JOINT, [torch.ones(9, 16, 2)])
        return block(x, rows=rows, mod=mod)[0]

    both = run(Row.of(txt=2, img=((0, 4), (1, 3))), mod)
    low, high = (run(Row.of(txt=2, img=7), mod[level : level + 1]) for level in (0, 1))
    torch.testing.assert_close(both, torch.cat([low[:6], high[6:]]))
    assert (low[6:] - high[6:]).abs().max() > 0.1
