"""Attention over packed rows, against softmax written out row by row in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from omni_grpc.nn.attention import Attention
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.ops.attention import varlen_attention


def naive(q: Tensor, k: Tensor, v: Tensor, lengths: list[tuple[int, int]], scale: float, causal: bool) -> Tensor:
    out, at_q, at_k = torch.zeros_like(q, dtype=torch.float64), 0, 0
    group = q.shape[1] // k.shape[1]
    for n, m in lengths:
        keys, values = k[at_k : at_k + m].double(), v[at_k : at_k + m].double()
        for i, head in itertools.product(range(n), range(q.shape[1])):
            seen = min(m, max(0, m - n + i + 1)) if causal else m
            if seen:
                scores = scale * keys[:seen, head // group] @ q[at_q + i, head].double()
                out[at_q + i, head] = scores.softmax(0) @ values[:seen, head // group]
        at_q, at_k = at_q + n, at_k + m
    return out


def operands(lengths: list[tuple[int, int]], heads: int, kv_heads: int, size: int = 8) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(len(lengths))
    queries, keys = (sum(column) for column in zip(*lengths, strict=True))
    shapes = ((queries, heads, size), (keys, kv_heads, size), (keys, kv_heads, size))
    cu = (torch.tensor([0, *itertools.accumulate(column)], dtype=torch.int32) for column in zip(*lengths, strict=True))
    return (*(torch.randn(shape, generator=generator) for shape in shapes), *cu)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5),
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.booleans(),
    st.sampled_from([0.3, 1.0]),
)
def test_rows_of_any_lengths(lengths, heads, causal, scale) -> None:
    q, k, v, cu_q, cu_k = operands(lengths, *heads)
    out = varlen_attention(q, k, v, cu_q, cu_k, 5, 5, scale, causal)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), naive(q, k, v, lengths, scale, causal), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_like_neighbours_do_not_see_each_other(causal: bool) -> None:
    lengths = [(4, 4), (4, 4), (4, 4), (2, 4), (2, 4), (0, 3), (5, 0)]
    q, k, v, cu_q, cu_k = operands(lengths, 4, 2)
    out = varlen_attention(q, k, v, cu_q, cu_k, 5, 4, 0.5, causal)
    torch.testing.assert_close(out.double(), naive(q, k, v, lengths, 0.5, causal), atol=1e-5, rtol=1e-5)
    assert torch.equal(out[-5:], torch.zeros(5, 4, 8))


@pytest.mark.parametrize("causal", [False, True])
def test_the_op_is_what_its_schema_and_its_fake_say(causal: bool) -> None:
    q, k, v, cu_q, cu_k = operands([(3, 3), (3, 3), (1, 4)], 4, 2)
    torch.library.opcheck(
        torch.ops.omni_grpc.varlen_attention.default,
        (q, k, v, cu_q, cu_k, 3, 4, 0.3, causal),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, cu: (q[:, :3], k, v, cu, cu), "3 query heads are not a multiple of 2"),
        (lambda q, k, v, cu: (q, k, v[:-1], cu, cu), "must have the same shape"),
        (lambda q, k, v, cu: (q[..., :4], k, v, cu, cu), "head sizes differ"),
        (lambda q, k, v, cu: (q.double(), k, v, cu, cu), "must have the same dtype"),
        (lambda q, k, v, cu: (q, k, v, cu.long(), cu), "int32"),
        (lambda q, k, v, cu: (q.flatten(1), k, v, cu, cu), r"\[T, H, D\]"),
    ],
)
def test_operands_that_disagree_are_refused(change, message) -> None:
    q, k, v, cu, _ = operands([(3, 3), (2, 2)], 4, 2)
    with pytest.raises(RuntimeError, match=message):
        varlen_attention(*change(q, k, v, cu), 3, 3, 1.0, False)


LENGTHS = [(2, 5), (2, 5), (0, 6), (3, 1)]
"""Text and image tokens of each row."""


@pytest.fixture
def rows() -> Rows:
    return Rows([(None, "cond")] * len(LENGTHS), [Row.of(txt=t, img=i) for t, i in LENGTHS], LayoutCache("cpu"))


def test_module_over_the_joint_stream_is_the_default(rows: Rows) -> None:
    lengths = [(t + i, t + i) for t, i in LENGTHS]
    q, k, v, *_ = operands(lengths, 4, 2)
    out = Attention(4, 8, num_kv_heads=2)(q, k, v, rows)
    torch.testing.assert_close(out.double(), naive(q, k, v, lengths, 8**-0.5, False), atol=1e-5, rtol=1e-5)


def test_module_over_one_stream_and_across_two(rows: Rows) -> None:
    alone = [(i, i) for _, i in LENGTHS]
    q, k, v, *_ = operands(alone, 4, 4)
    out = Attention(4, 8, causal=True, softmax_scale=0.7)(q, k, v, rows, over="img")
    torch.testing.assert_close(out.double(), naive(q, k, v, alone, 0.7, True), atol=1e-5, rtol=1e-5)

    across = [(i, t) for t, i in LENGTHS]
    q, k, v, *_ = operands(across, 4, 4)
    out = Attention(4, 8, role="cross")(q, k, v, rows, over="img", kv="txt")
    torch.testing.assert_close(out.double(), naive(q, k, v, across, 8**-0.5, False), atol=1e-5, rtol=1e-5)


def test_module_refuses_heads_that_do_not_divide_and_keeps_its_roles() -> None:
    with pytest.raises(ValueError, match="num_heads 4 is no multiple of num_kv_heads 3"):
        Attention(4, 8, num_kv_heads=3)
    attention = Attention(4, 8, role="cross", role_category="text", skip_sequence_parallel=True)
    assert (attention.role, attention.role_category, attention.skip_sequence_parallel) == ("cross", "text", True)
    assert Attention(4, 8).role_category == "self"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 1e-5)])
def test_on_cuda(dtype: torch.dtype, tolerance: float, causal: bool) -> None:
    lengths = [(40, 40), (40, 40), (7, 130), (64, 3), (0, 3), (5, 0)]
    q, k, v, cu_q, cu_k = operands(lengths, 4, 2, size=64)
    expected = naive(*(x.to(dtype) for x in (q, k, v)), lengths, 0.125, causal)
    on_device = [x.cuda() if x.dtype == torch.int32 else x.to("cuda", dtype) for x in (q, k, v, cu_q, cu_k)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if dtype != torch.float32 else "default")
    try:
        out = varlen_attention(*on_device, 64, 130, 0.125, causal)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.double().cpu(), expected, atol=tolerance, rtol=tolerance)
