"""Attention by our own kernel for CPUs: against the definition in float64, and what holds to the bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from omni_grpc import ops
from omni_grpc.ops.attention_cpu import attention_cpu

pytestmark = pytest.mark.skipif(not ops.load_native().loaded, reason="no op library")

F32, BF16 = torch.float32, torch.bfloat16
SIZES = (1, 3, 8, 17, 32, 40, 72, 128, 160)
LENGTHS = ([(1, 1)], [(16, 64), (15, 63), (17, 65)], [(127, 1), (0, 9), (4, 0), (129, 190)], [(300, 300), (2, 31)], [])


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def operands(
    lengths: Sequence[tuple[int, int]], heads: int = 4, kv_heads: int = 4, size: int = 32, dtype: torch.dtype = F32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    queries, keys = [n for n, _ in lengths], [m for _, m in lengths]
    q = torch.randn(sum(queries), heads, size).to(dtype)
    k, v = (torch.randn(sum(keys), kv_heads, size).to(dtype) for _ in range(2))
    return q, k, v, offsets(queries), offsets(keys)


def defined(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, causal: bool = False) -> Tensor:
    return attention_cpu.reference(q.double(), k.double(), v.double(), cu_q, cu_k, scale, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_definition_at_any_size(size: int, dtype: torch.dtype, causal: bool, seed: int) -> None:
    for lengths, (heads, kv_heads) in itertools.product(LENGTHS, ((4, 4), (6, 2), (3, 1))):
        x = operands(lengths, heads, kv_heads, size, dtype)
        out = attention_cpu(*x, size**-0.5, causal)
        close = 5e-6 if dtype == F32 else 1e-2
        torch.testing.assert_close(
            out.double(), defined(*x, size**-0.5, causal), atol=close, rtol=close, msg=lambda text: f"{seed}: {text}"
        )


def test_views_are_read_where_they_lie(seed: int) -> None:
    lengths = [(70, 70), (33, 33)]
    cu = offsets([n for n, _ in lengths])
    packed = torch.randn(103, 3, 4, 24)
    by_head = torch.randn(4, 103, 24).transpose(0, 1)
    spread = torch.randn(103, 4, 48)[..., ::2]
    for q, k, v in (packed.unbind(1), (by_head, by_head, packed[:, 2]), (spread, spread, spread)):
        given = [x.clone() for x in (q, k, v)]
        out = attention_cpu(q, k, v, cu, cu, 0.2, False)
        assert out.is_contiguous()
        assert torch.equal(out, attention_cpu(*(x.contiguous() for x in given), cu, cu, 0.2, False)), seed
        assert all(torch.equal(x, y) for x, y in zip((q, k, v), given, strict=True))


@pytest.mark.parametrize("factor", [1e-20, 1e-3, 30.0, 1e4])
def test_magnitudes(factor: float, seed: int) -> None:
    """Of queries, to where one key takes it all, and of values."""
    q, k, v, cu_q, cu_k = operands([(40, 200), (9, 70)])
    out = attention_cpu(q * factor, k, v, cu_q, cu_k, 0.2, False)
    # what a score is rounded by, as a share of a weight
    close = 5e-6 * (1 + factor)
    torch.testing.assert_close(out.double(), defined(q * factor, k, v, cu_q, cu_k, 0.2), atol=close, rtol=close)
    scaled = attention_cpu(q, k, v * factor, cu_q, cu_k, 0.2, False)
    torch.testing.assert_close(
        scaled.double(), defined(q, k, v * factor, cu_q, cu_k, 0.2), atol=5e-6 * factor, rtol=5e-6
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_not_finite_is_where_the_formula_has_it(bad: float, dtype: torch.dtype, seed: int) -> None:
    """A query spoils itself, a key its row and head, a value its channel of them; other rows get what they got."""
    x = operands([(40, 90), (20, 150), (7, 7)], size=24, dtype=dtype)
    clean = attention_cpu(*x, 0.2, False)
    for which, at in ((0, 45), (1, 100), (2, 100)):
        spoiled = [each.clone() for each in x]
        spoiled[which][at, 1, 5] = bad
        out = attention_cpu(*spoiled, 0.2, False)
        want = defined(*spoiled, 0.2)
        assert torch.equal(out.isnan(), want.isnan()), f"{which}, seed {seed}"
        assert torch.equal(out.isfinite(), want.isfinite()), f"{which}, seed {seed}"
        assert not out.isfinite().all()
        for rows in (slice(0, 40), slice(60, None)):
            assert torch.equal(out[rows], clean[rows]), f"{which}, seed {seed}"


WHERE = tuple(itertools.product("qkv", (math.nan, math.inf, -math.inf), (0, 100, 239)))
"""What is not finite, and where: in a query, key or value, at the beginning or the end of a row or in the middle."""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64])
def test_the_definition_is_torchs_sdpa_row_by_row_also_where_something_is_not_finite(
    dtype: torch.dtype, causal: bool, seed: int
) -> None:
    """To the bit, NaN where it has NaN: the definition hides none."""
    torch.manual_seed(seed)
    lengths = [(40, 90), (20, 150), (33, 33), (9, 4), (5, 0)]
    for which, bad, at in WHERE:
        x = dict(zip("qkv", operands(lengths, size=24, dtype=dtype)[:3], strict=True))
        x[which][min(at, len(x[which]) - 1), 1, 5] = bad
        cu_q, cu_k = (offsets([row[side] for row in lengths]) for side in (0, 1))
        out = attention_cpu.reference(*x.values(), cu_q, cu_k, 0.2, causal)
        for row, (n, m) in enumerate(lengths):
            of_q, of_k = (slice(int(cu[row]), int(cu[row + 1])) for cu in (cu_q, cu_k))
            q, k, v = (each[of].transpose(0, 1)[None] for each, of in zip(x.values(), (of_q, of_k, of_k), strict=True))
            blind = n if m == 0 else max(0, n - m) if causal else 0
            q, n = q[:, :, blind:], n - blind
            mask = torch.ones(n, m, dtype=torch.bool).tril(m - n) if causal and n != m else None
            alone = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal and n == m, scale=0.2
            )
            where = f"row {row}, {which}[{at}] = {bad}, seed {seed}"
            assert not out[of_q][:blind].any(), where
            if n:
                torch.testing.assert_close(
                    out[of_q][blind:], alone[0].transpose(0, 1), rtol=0, atol=0, equal_nan=True, msg=where
                )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_not_finite_reaches_who_sees_it_and_no_other_row(dtype: torch.dtype, causal: bool, seed: int) -> None:
    """Against each query by itself with the keys that it sees. A key that is hidden reaches nobody; a hidden value may
    reach the queries before it, with a weight of 0, as in torch's SDPA.
    """
    torch.manual_seed(seed)
    lengths = [(40, 90), (20, 150), (33, 33)]
    x = operands(lengths, size=24, dtype=dtype)
    clean = attention_cpu(*x, 0.2, causal)
    starts = [*itertools.accumulate((n for n, _ in lengths), initial=0)]
    for which, bad, at in WHERE:
        spoiled = [each.clone() for each in x]
        side = "qkv".index(which)
        at = min(at, len(spoiled[side]) - 1)
        spoiled[side][at, 1, 5] = bad
        out, want = attention_cpu(*spoiled, 0.2, causal), one_by_one(*spoiled, lengths, causal)
        where = f"{which}[{at}] = {bad}, seed {seed}"
        row = int(torch.searchsorted(x[3 if which == "q" else 4], at, right=True)) - 1
        others = torch.ones(len(out), dtype=torch.bool)
        others[starts[row] : starts[row + 1]] = False
        assert torch.equal(out[others], clean[others]), where
        assert out.isnan()[want.isnan()].all(), where
        assert not out.isfinite()[~want.isfinite()].any(), where
        if not (causal and which == "v"):
            assert torch.equal(out.isnan(), want.isnan()), where
            assert torch.equal(out.isfinite(), want.isfinite()), where
        else:
            untouched = torch.ones(out.shape, dtype=torch.bool)
            untouched[starts[row] : starts[row + 1], 1, 5] = False
            assert torch.equal(out[untouched], clean[untouched]), where


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, lengths: Sequence[tuple[int, int]], causal: bool
) -> Tensor:
    """The formula for every query with those keys and values alone that it sees."""
    rows = []
    for row, (n, m) in enumerate(lengths):
        of_q, of_k = (slice(int(cu[row]), int(cu[row + 1])) for cu in (cu_q, cu_k))
        sees = torch.ones(n, m, dtype=torch.bool).tril(m - n if causal else m)
        scores = torch.einsum("nhd,mhd->hnm", q[of_q].double(), k[of_k].double()) * 0.2
        weights = torch.where(sees, scores, -math.inf).softmax(-1)
        values = torch.where(sees[:, :, None, None], v[of_k].double(), 0.0)
        rows.append(torch.einsum("hnm,nmhd->nhd", weights, values))
    return torch.cat(rows)


def test_a_row_comes_out_alike_in_any_batch_and_on_any_number_of_threads(seed: int) -> None:
    lengths = [(80, 80), (300, 300), (68, 200), (1, 1), (131, 64)]
    q, k, v, cu_q, cu_k = operands(lengths, 4, 2, 40)
    threads = torch.get_num_threads()
    try:
        outs = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outs.append(attention_cpu(q, k, v, cu_q, cu_k, 0.2, False))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(outs[0], out) for out in outs[1:]), seed
    for row, (n, m) in enumerate(lengths):
        of_q, of_k = (slice(int(cu[row]), int(cu[row + 1])) for cu in (cu_q, cu_k))
        alone = attention_cpu(q[of_q], k[of_k], v[of_k], offsets([n]), offsets([m]), 0.2, False)
        assert torch.equal(outs[0][of_q], alone), f"row {row}, seed {seed}"


def test_the_op_is_what_its_schema_and_its_fake_say() -> None:
    x = operands([(5, 7), (3, 2)], 4, 2)
    torch.library.opcheck(torch.ops.omni_grpc.attention_cpu.default, (*x, 0.3, False))
    compiled = torch.compile(lambda *x: attention_cpu(*x, 0.3, False), fullgraph=True, backend="eager")
    assert torch.equal(compiled(*x), attention_cpu(*x, 0.3, False))


Change = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, cu: (q[0], k, v, cu), r"q, k, v must be \[T, H, D\], got 2, 3 and 3 dimensions"),
        (lambda q, k, v, cu: (q, k, v[:-1], cu), r"k is \(6, 2, 8\) and v \(5, 2, 8\); they must have the same shape"),
        (lambda q, k, v, cu: (q[..., :4], k, v, cu), "head sizes differ: q 4, k 8"),
        (lambda q, k, v, cu: (q[:, :3], k, v, cu), "3 query heads are not a multiple of 2 key heads"),
        (lambda q, k, v, cu: (q, k[:, :0], v[:, :0], cu), "4 query heads are not a multiple of 0 key heads"),
        (lambda q, k, v, cu: (q.bfloat16(), k, v, cu), "q, k and v must have the same dtype"),
        (lambda q, k, v, cu: (q, k, v, cu.long()), "cu_q and cu_k must be int32 and of the same length"),
    ],
)
def test_operands_that_disagree_are_refused_in_the_words_of_the_definition(change: Change, message: str) -> None:
    q, k, v, cu, _ = operands([(4, 4), (2, 2)], 4, 2, 8)
    q, k, v, cu = change(q, k, v, cu)
    for call in (attention_cpu, attention_cpu.reference):
        with pytest.raises(RuntimeError, match=f"attention_cpu: {message}"):
            call(q, k, v, cu, cu, 0.3, False)


@pytest.mark.parametrize("wrong", [[0, 4], [1, 6], [0, 7], [0, 5, 4, 6], [0, -1, 6]])
def test_offsets_that_lead_elsewhere_are_refused(wrong: list[int]) -> None:
    """The kernel would read there."""
    q, k, v, cu, _ = operands([(6, 6)], 2, 2, 8)
    bad = torch.tensor(wrong, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="attention_cpu: cu_q must go from 0 to 6 without decreasing"):
        attention_cpu(q, k, v, bad, bad, 0.3, False)
    if len(wrong) == 2:
        with pytest.raises(RuntimeError, match="attention_cpu: cu_k must go from 0 to 6 without decreasing"):
            attention_cpu(q, k, v, cu, bad, 0.3, False)


def test_float64_is_refused_by_name() -> None:
    q, k, v, cu, _ = operands([(6, 6)], 2, 2, 8, torch.float64)
    with pytest.raises(RuntimeError, match="attention_cpu: the kernel takes float32 and bfloat16, q is neither"):
        attention_cpu(q, k, v, cu, cu, 0.3, False)
