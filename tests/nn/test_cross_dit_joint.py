"""CrossDiTBlock over all streams of a row, against diffusers' HeliosTransformerBlock, which has a history."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from diffusers.models.transformers.transformer_helios import HeliosTransformerBlock

from omni_grpc.nn.cross_dit import CrossDiTBlock, text_constants
from omni_grpc.nn.rows import JOINT, MOD, LayoutCache, Row, Rows
from omni_grpc.nn.stack import Stack

HEADS, HEAD_SIZE, FF = 4, 16, 96
CHANNELS = HEADS * HEAD_SIZE
LAYOUTS = LayoutCache("cpu")
SIZES = [(7, 3, 12), (12, 0, 8), (5, 9, 6)]
"""Tokens of the text, of the past and of the present of each row."""


def rows_of(sizes: list[tuple[int, int, int]]) -> Rows:
    packed = [Row.of(txt=txt, old=((1, old),), img=img, aside=("txt",)) for txt, old, img in sizes]
    return Rows([(None, str(number)) for number in range(len(packed))], packed, LAYOUTS)


def ours(oracle: HeliosTransformerBlock) -> CrossDiTBlock:
    weights = oracle.state_dict()
    for whole, parts in {"attn1.to_qkv": ("to_q", "to_k", "to_v"), "attn2.to_kv": ("to_k", "to_v")}.items():
        attention = whole.partition(".")[0]
        for leaf in ("weight", "bias"):
            weights[f"{whole}.{leaf}"] = torch.cat([weights.pop(f"{attention}.{part}.{leaf}") for part in parts])
    for old, new in {".to_out.0.": ".to_out.", ".net.0.proj.": ".up.", ".net.2.": ".down."}.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    block = CrossDiTBlock(HEADS, HEAD_SIZE, FF, stream=JOINT).requires_grad_(False)
    block.load_state_dict(weights)
    return block


@pytest.mark.parametrize("chosen", [(0, 1, 2), (0,)])
def test_all_streams_attend_to_each_other_and_one_looks_across_to_the_text(chosen: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    oracle = HeliosTransformerBlock(CHANNELS, FF, HEADS, cross_attn_norm=True, guidance_cross_attn=True)
    for parameter in oracle.requires_grad_(False).parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    stack = Stack(blocks=[ours(oracle)])
    sizes = [SIZES[row] for row in chosen]
    rows = rows_of(sizes)
    txt = [torch.randn(n, CHANNELS, generator=generator) for n, _, _ in sizes]
    carry = {name: torch.randn(rows.stream(name).total, CHANNELS, generator=generator) for name in ("old", "img")}
    mod = torch.randn(rows.stream(MOD).total, 6 * CHANNELS, generator=generator)
    angles = torch.randn(rows.stream(JOINT).total, HEAD_SIZE // 2, generator=generator)
    per_row = [text_constants(stack.group("blocks"), part) for part in txt]
    for name in per_row[0]:
        rows.bind(name, "txt", [constants[name][1] for constants in per_row])
    rows.bind("rope", JOINT, rows.stream(JOINT).split(torch.stack([angles.cos(), angles.sin()], -1)))
    rows.bind("blocks", MOD, rows.stream(MOD).split(stack.modulation(mod)["blocks"]))

    out = stack(carry, rows)
    freqs = torch.cat([table.repeat_interleave(2, -1) for table in (angles.cos(), angles.sin())], -1)
    for row, (_, old, img) in enumerate(sizes):
        x = torch.cat([part[rows.stream(name).slice(row)] for name, part in carry.items()])
        vectors = mod[rows.index[JOINT][rows.stream(JOINT).slice(row)]].unflatten(-1, (6, -1))
        expected = oracle(x[None], txt[row][None], vectors[None], freqs[rows.stream(JOINT).slice(row)][None], img)[0]
        for name, part in zip(("old", "img"), expected.split((old, img)), strict=True):
            torch.testing.assert_close(out[name][rows.stream(name).slice(row)], part, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chosen", [(0, 1), (0,)])
def test_such_a_block_compiles_once_for_all_geometries(chosen: tuple[int, ...]) -> None:
    block = CrossDiTBlock(HEADS, HEAD_SIZE, FF, stream=JOINT).requires_grad_(False)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    counts = []
    # no size is 1, nor equal to a size of the weights
    for sizes in ([(7, 5, 35), (19, 9, 24)], [(9, 11, 21), (5, 3, 30)]):
        rows = rows_of([sizes[row] for row in chosen])
        rows.bind(
            "rope", JOINT, [torch.randn(n, HEAD_SIZE // 2, 2, generator=generator) for n in rows.stream(JOINT).lengths]
        )
        x = torch.randn(rows.stream(JOINT).total, CHANNELS, generator=generator)
        mod = torch.randn(2 * len(chosen), 6 * CHANNELS, generator=generator)
        text = {
            name: torch.randn(rows.stream("txt").total, HEADS, HEAD_SIZE, generator=generator)
            for name in ("text_k", "text_v")
        }
        (out,) = compiled(x, rows=rows, mod=mod, **text)
        torch.testing.assert_close(out, block(x, rows=rows, mod=mod, **text)[0])
        counts.append(counter.frame_count)
    assert counts[0] == counts[1], counts
