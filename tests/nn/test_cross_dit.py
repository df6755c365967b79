"""CrossDiTBlock against diffusers' WanTransformerBlock with the same weights: rows of unlike sizes and levels."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed, WanTransformerBlock
from torch import Tensor

from omni_grpc.nn.cross_dit import CrossDiTBlock, text_constants
from omni_grpc.nn.rope import rope_table
from omni_grpc.nn.rows import MOD, LayoutCache, Row, Rows
from omni_grpc.nn.stack import Stack

HEADS, HEAD_SIZE, FF, BLOCKS = 4, 16, 96, 3
CHANNELS = HEADS * HEAD_SIZE
AXES = (8, 4, 4)
LAYOUTS = LayoutCache("cpu")

GRIDS = [(3, 2, 4), (1, 4, 2), (2, 3, 2)]
"""Frames, height and width of each row, in tokens."""
ROWS = [Row.of(txt=7, img=((1, 8), (0, 16))), Row.of(txt=12, img=8), Row.of(txt=5, img=((0, 5), (1, 3), (2, 4)))]


def theirs(generator: torch.Generator) -> WanTransformerBlock:
    block = WanTransformerBlock(CHANNELS, FF, HEADS, cross_attn_norm=True).requires_grad_(False)
    for name, parameter in block.named_parameters():
        # norms scale by other than 1, and gates are of a size that matters
        base = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.copy_(base + 0.15 * torch.randn(parameter.shape, generator=generator))
    return block


def ours(block: WanTransformerBlock) -> CrossDiTBlock:
    """The same weights under our names; those of fused layers end to end."""
    weights = block.state_dict()
    for whole, parts in {"attn1.to_qkv": ("to_q", "to_k", "to_v"), "attn2.to_kv": ("to_k", "to_v")}.items():
        attention = whole.partition(".")[0]
        for leaf in ("weight", "bias"):
            weights[f"{whole}.{leaf}"] = torch.cat([weights.pop(f"{attention}.{part}.{leaf}") for part in parts])
    renames = {".to_out.0.": ".to_out.", ".net.0.proj.": ".up.", ".net.2.": ".down."}
    for old, new in renames.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    made = CrossDiTBlock(HEADS, HEAD_SIZE, FF).requires_grad_(False)
    made.load_state_dict(weights)
    return made


class Case:
    """Blocks of both kinds, and for each row its tokens, text and modulation vectors."""

    def __init__(self, rows: list[Row]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = rows
        self.theirs = [theirs(generator) for _ in range(BLOCKS)]
        self.stack = Stack(blocks=[ours(block) for block in self.theirs])
        self.img = [torch.randn(row.lengths[1], CHANNELS, generator=generator) for row in rows]
        self.txt = [torch.randn(row.lengths[0], CHANNELS, generator=generator) for row in rows]
        self.mod = [torch.randn(row.levels, 6 * CHANNELS, generator=generator) for row in rows]

    def batch(self) -> Rows:
        rows = Rows([(None, str(number)) for number in range(len(self.rows))], self.rows, LAYOUTS)
        per_row = [text_constants(self.stack.group("blocks"), txt) for txt in self.txt]
        for name in per_row[0]:
            rows.bind(name, "txt", [constants[name][1] for constants in per_row])
        rows.bind("rope", "img", [rope(grid) for grid in GRIDS[: len(self.rows)]])
        rows.bind("blocks", MOD, [self.stack.modulation(mod)["blocks"] for mod in self.mod])
        return rows

    def expected(self) -> Tensor:
        """Row by row, as diffusers runs it: per-token modulation [1, S, 6, C]."""
        rotary = WanRotaryPosEmbed(HEAD_SIZE, (1, 1, 1), 16)
        results = []
        for row, grid, img, txt, mod in zip(self.rows, GRIDS, self.img, self.txt, self.mod, strict=False):
            levels = torch.cat([torch.full((tokens,), level) for level, tokens in row.streams[1][1]])
            temb = mod[levels].unflatten(-1, (6, -1))[None]
            x = img[None]
            for block in self.theirs:
                x = block(x, txt[None].to(x.dtype), temb, rotary(torch.zeros(1, 1, *grid)))
            results.append(x[0])
        return torch.cat(results)


def rope(grid: tuple[int, int, int]) -> Tensor:
    return rope_table(torch.cartesian_prod(*map(torch.arange, grid)), AXES, dtype=torch.float64)


def test_unlike_rows_match_diffusers_one_by_one() -> None:
    case = Case(ROWS)
    out = case.stack({"img": torch.cat(case.img)}, case.batch())["img"]
    torch.testing.assert_close(out, case.expected(), rtol=1e-5, atol=1e-5)


def test_a_row_without_neighbours_matches_its_own_part_of_a_batch() -> None:
    case, alone = Case(ROWS), Case(ROWS[:1])
    first = case.stack({"img": torch.cat(case.img)}, case.batch())["img"][:24]
    alone.stack, alone.img, alone.txt, alone.mod = case.stack, case.img[:1], case.txt[:1], case.mod[:1]
    out = alone.stack({"img": alone.img[0]}, alone.batch())["img"]
    torch.testing.assert_close(out, first, rtol=0, atol=1e-5)


def test_in_bfloat16_sums_and_gates_stay_in_float32() -> None:
    """Tokens and most weights in bfloat16, norms and tables in float32, as diffusers keeps them: no farther from the
    same in float32 than diffusers is. Rounding each sum to bfloat16 halfway would be, by a tenth.
    """
    case = Case(ROWS)
    blocks = [*case.theirs, *case.stack.group("blocks")]
    for block in blocks:
        for name, parameter in block.named_parameters():
            if not name.startswith(("scale_shift_table", "norm2")):
                parameter.data = parameter.data.bfloat16()
    case.img, case.txt, case.mod = ([x.bfloat16() for x in part] for part in (case.img, case.txt, case.mod))
    out, theirs = case.stack({"img": torch.cat(case.img)}, case.batch())["img"], case.expected()
    assert out.dtype is torch.bfloat16
    for block in blocks:
        block.float()
    case.img, case.txt, case.mod = ([x.float() for x in part] for part in (case.img, case.txt, case.mod))
    exact = case.expected()
    error, allowed = ((x.float() - exact).square().mean().sqrt() for x in (out, theirs))
    assert error < 1.04 * allowed


def test_one_modulation_serves_all_blocks_and_is_never_expanded() -> None:
    case = Case(ROWS)
    rows = case.batch()
    assert rows["blocks"].shape == (6, 1, 6 * CHANNELS)
    mod = torch.randn(2, 6 * CHANNELS)
    assert case.stack.modulation(mod)["blocks"].data_ptr() == mod.data_ptr()


def test_text_keys_and_values_are_those_of_each_block() -> None:
    case = Case(ROWS[:1])
    (txt,) = case.txt
    constants = text_constants(case.stack.group("blocks"), txt)
    for place, block in enumerate(case.theirs):
        keys = block.attn2.norm_k(block.attn2.to_k(txt)).unflatten(-1, (HEADS, -1))
        values = block.attn2.to_v(txt).unflatten(-1, (HEADS, -1))
        torch.testing.assert_close(constants["text_k"][1][:, place], keys)
        torch.testing.assert_close(constants["text_v"][1][:, place], values)


@pytest.mark.parametrize("chosen", [(0, 1, 2), (0,)])
def test_a_block_compiles_once_for_all_geometries(chosen: tuple[int, ...]) -> None:
    block = CrossDiTBlock(HEADS, HEAD_SIZE, FF).requires_grad_(False)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    counts = []
    # no size is 1, nor equal to a size of the weights
    for sizes in ([(7, 35), (19, 24), (12, 26)], [(9, 21), (5, 30), (11, 14)]):
        packed = [Row.of(txt=txt, img=img) for txt, img in (sizes[number] for number in chosen)]
        rows = Rows([(None, str(number)) for number in range(len(packed))], packed, LAYOUTS)
        rows.bind("rope", "img", [torch.randn(n, 8, 2, generator=generator) for n in rows.stream("img").lengths])
        img = torch.randn(rows.stream("img").total, CHANNELS, generator=generator)
        mod = torch.randn(len(packed), 6 * CHANNELS, generator=generator)
        text = {
            name: torch.randn(rows.stream("txt").total, HEADS, HEAD_SIZE, generator=generator)
            for name in ("text_k", "text_v")
        }
        (out,) = compiled(img, rows=rows, mod=mod, **text)
        torch.testing.assert_close(out, block(img, rows=rows, mod=mod, **text)[0])
        counts.append(counter.frame_count)
    assert counts[0] == counts[1], counts
