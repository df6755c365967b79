"""Queries and keys on their way to attention: the norms as modules, with and without a feature in their place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from omni_grpc.nn.attention import Attention
from omni_grpc.nn.coming import Begun
from omni_grpc.nn.norms import AcrossHeadsNorm
from omni_grpc.nn.query_key import Projected, attend_joint, norm_rope, norm_rope_joint
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.ops.attention_kernels import Offsets, quantized_reference
from omni_grpc.ops.attention_q import attention_q
from omni_grpc.ops.rope import Heads
from omni_grpc.ops.rope_heads import qk_norm_rope_quantize_heads
from omni_grpc.ops.rope_tiles import qk_norm_rope_quantize_tiles
from tests.ops.attention_cases import EIGHT_BITS

HEADS, SIZE, EPS = 3, 8, 1e-3


class InPlaceOf(nn.Module):
    """What a feature might put around a norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.shapes = norm, []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return 2 * self.norm(x)


def norm(kind: type[nn.Module], generator: torch.Generator) -> nn.Module:
    channels = SIZE if kind is nn.RMSNorm else HEADS * SIZE
    made = kind(channels, EPS).requires_grad_(False)
    made.weight.copy_(torch.randn(channels, generator=generator) + 1)
    return made


def projected(tokens: int, kind: type[nn.Module], generator: torch.Generator) -> Projected:
    q, k, v = torch.randn(tokens, 3, HEADS, SIZE, generator=generator).unbind(1)
    return Projected(q, k, v, norm(kind, generator), norm(kind, generator))


def by_modules(part: Projected, table: Tensor) -> tuple[Tensor, ...]:
    """The norms called as modules, and the turn as a product of complex numbers."""
    turns, results = torch.view_as_complex(table)[:, None], []
    for x, norm in ((part.q, part.norm_q), (part.k, part.norm_k)):
        normed = norm(x) if isinstance(norm, nn.RMSNorm) else norm(x.flatten(1)).view(x.shape)
        pairs = torch.view_as_complex(normed.unflatten(-1, (-1, 2)).contiguous())
        results.append(torch.view_as_real(pairs * turns).flatten(-2))
    return (*results, part.v)


@pytest.mark.parametrize("kind", [nn.RMSNorm, AcrossHeadsNorm])
def test_one_stream(kind: type[nn.Module]) -> None:
    generator = torch.Generator().manual_seed(0)
    part, table = projected(5, kind, generator), torch.randn(5, SIZE // 2, 2, generator=generator)
    for mine, expected in zip(norm_rope(part, table, "img"), by_modules(part, table), strict=True):
        torch.testing.assert_close(mine, expected)


def test_a_module_in_the_place_of_a_norm_is_called_with_all_heads_of_a_token() -> None:
    generator = torch.Generator().manual_seed(0)
    part, table = projected(5, AcrossHeadsNorm, generator), torch.randn(5, SIZE // 2, 2, generator=generator)
    around = InPlaceOf(part.norm_k)
    part = part._replace(norm_k=around)
    for mine, expected in zip(norm_rope(part, table, "img"), by_modules(part, table), strict=True):
        torch.testing.assert_close(mine, expected)
    assert around.shapes[0] == (5, HEADS * SIZE)


@pytest.mark.parametrize("kind", [nn.RMSNorm, AcrossHeadsNorm])
def test_attention_gets_codes_where_it_reads_them_and_norms_bound_them(kind: type[nn.Module]) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [(3, 20), (0, 5), (5, 9)]
    rows = Rows([(None, "cond")] * 3, [Row.of(txt=txt, img=img) for txt, img in lengths], LayoutCache("cpu"))
    parts = {name: projected(rows.stream(name).total, kind, generator) for name in ("txt", "img")}
    angles = torch.randn(rows.stream("joint").total, SIZE // 2, generator=generator)
    table, attention = torch.stack([angles.cos(), angles.sin()], -1), Attention(HEADS, SIZE)
    exact = attention(*norm_rope_joint(parts, table, rows), rows)
    assert torch.equal(attend_joint(attention, parts, table, rows), exact)
    attention.backend = "FP8_ATTN"
    out = attend_joint(attention, parts, table, rows)
    assert 1e-3 < (out - exact).norm() / exact.norm() < EIGHT_BITS
    norm = "rms" if kind is nn.RMSNorm else "rms_across"
    streams = [Heads(*part[:3], (part.norm_q.weight, part.norm_k.weight)) for part in parts.values()]
    stream = rows.stream("joint")
    place = [rows.place[name] for name in parts]
    coded = qk_norm_rope_quantize_heads(streams, table, place, stream.cu, norm=norm, eps=EPS)
    at = Offsets(cu_q=stream.cu, cu_k=stream.cu, longest_q=stream.longest, longest_k=stream.longest)
    assert torch.equal(out, quantized_reference(coded, at, SIZE**-0.5, False))
    if kind is nn.RMSNorm:
        return
    # another module than a norm bounds nothing: codes are made of what leaves it
    around = {name: part._replace(norm_k=InPlaceOf(part.norm_k)) for name, part in parts.items()}
    attention.backend = "TORCH_SDPA"
    exact = attend_joint(attention, around, table, rows)
    attention.backend = "FP8_ATTN"
    out = attend_joint(attention, around, table, rows)
    assert 1e-3 < (out - exact).norm() / exact.norm() < EIGHT_BITS


@pytest.mark.parametrize("kind", [nn.RMSNorm, AcrossHeadsNorm])
def test_int8_attention_gets_tiles_of_codes_from_the_pass_before_it(kind: type[nn.Module]) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [(3, 20), (0, 5), (5, 9)]
    rows = Rows([(None, "cond")] * 3, [Row.of(txt=txt, img=img) for txt, img in lengths], LayoutCache("cpu"))
    parts = {name: projected(rows.stream(name).total, kind, generator) for name in ("txt", "img")}
    angles = torch.randn(rows.stream("joint").total, SIZE // 2, generator=generator)
    table, attention = torch.stack([angles.cos(), angles.sin()], -1), Attention(HEADS, SIZE)
    exact = attention(*norm_rope_joint(parts, table, rows), rows)
    attention.backend = "INT8_ATTN"
    out = attend_joint(attention, parts, table, rows)
    assert 1e-3 < (out - exact).norm() / exact.norm() < EIGHT_BITS
    norm = "rms" if kind is nn.RMSNorm else "rms_across"
    streams = [Heads(*part[:3], (part.norm_q.weight, part.norm_k.weight)) for part in parts.values()]
    stream = rows.stream("joint")
    tiles = qk_norm_rope_quantize_tiles(
        streams, table, [rows.place[name] for name in parts], stream.cu, norm=norm, eps=EPS
    )
    want = attention_q(tiles, stream.cu, stream.cu, stream.total, SIZE**-0.5)[..., :SIZE]
    assert torch.equal(out, want.to(out.dtype))


@pytest.mark.parametrize("lengths", [[(3, 4)], [(3, 4), (0, 2), (5, 1)]])
def test_streams_come_in_the_order_of_their_rows(lengths: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = Rows([(None, "cond")] * len(lengths), [Row.of(txt=txt, img=img) for txt, img in lengths], LayoutCache("cpu"))
    parts = {
        name: projected(rows.stream(name).total, nn.RMSNorm, generator)
        for name in ("img", "txt")  # in another order than the rows have them
    }
    table = torch.randn(rows.stream("joint").total, SIZE // 2, 2, generator=generator)
    tables = rows.split(table)
    alone = {name: by_modules(part, tables[name]) for name, part in parts.items()}
    for which, mine in enumerate(norm_rope_joint(parts, table, rows)):
        torch.testing.assert_close(mine, rows.join({name: made[which] for name, made in alone.items()}))


class Early(Attention):
    """Takes its values before queries and keys are there."""

    values: Tensor

    def begin_values(self, v: Begun, rows: Rows, over: str = "joint") -> Begun:
        self.values = v()
        return lambda: self.values


@pytest.mark.parametrize("lengths", [[(3, 4)], [(3, 4), (0, 2), (5, 1)]])
@pytest.mark.parametrize("kind", [nn.RMSNorm, AcrossHeadsNorm, InPlaceOf])
def test_values_that_are_taken_first_are_those_of_the_joint_order(
    lengths: list[tuple[int, int]], kind: type[nn.Module]
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = Rows([(None, "cond")] * len(lengths), [Row.of(txt=txt, img=img) for txt, img in lengths], LayoutCache("cpu"))
    of = nn.RMSNorm if kind is nn.RMSNorm else AcrossHeadsNorm
    parts = {name: projected(rows.stream(name).total, of, generator) for name in ("img", "txt")}
    if kind is InPlaceOf:
        parts = {name: part._replace(norm_q=InPlaceOf(part.norm_q)) for name, part in parts.items()}
    table = torch.randn(rows.stream("joint").total, SIZE // 2, 2, generator=generator)
    early = Early(HEADS, SIZE)
    out = attend_joint(early, parts, table, rows)
    assert torch.equal(early.values, rows.join({name: part.v for name, part in parts.items()}))
    assert torch.equal(out, attend_joint(Attention(HEADS, SIZE), parts, table, rows))


def test_attention_that_waits_for_nothing_is_computed_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = Rows([(None, "cond")], [Row.of(img=5)], LayoutCache("cpu"))
    q, k, v = torch.randn(5, 3, HEADS, SIZE, generator=generator).unbind(1)
    attention = Attention(HEADS, SIZE)
    assert attention.begin_values(lambda: pytest.fail("the values are not asked for"), rows) is None
    expected = attention(q, k, v, rows)
    begun = attention.begin(q, k, v, rows)
    v.zero_()
    assert torch.equal(begun(), expected)
