"""The heads family: queries, keys and values of packed rows in e4m3, with one scale for each head of each row, as
attention in 8 bits reads them.

Shapes: T packed tokens, H query heads, K key/value heads (H is a multiple of K), D head size, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from omni_grpc.ops.library import declare

KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16})
CODES = torch.float8_e4m3fn
LARGEST = 448.0


class CodedHeads(NamedTuple):
    """q [Tq, H, D], k and v [Tk, K, D] in e4m3: x is about codes * scale. scales: float32 [3, R, K], of q, k and v;
    the H / K query heads that share a key head share a scale.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scales: Tensor


def quantize_heads(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int
) -> CodedHeads:
    """q [Tq, H, D], k and v [Tk, K, D], of one dtype, in e4m3.

    cu_q, cu_k: int32 [R + 1], the offsets of the rows; longest_*: upper bounds of a row's length. A scale is the
    largest magnitude of a row's head over 448; one of zeros is 0, and one that is not finite makes all that it scales
    NaN. Raises RuntimeError where shapes, dtypes or devices disagree.
    """
    call = _quantize_heads if q.dtype in KERNEL_DTYPES else quantize_heads_reference
    return CodedHeads(*call(q, k, v, cu_q, cu_k, longest_q, longest_k))


def quantize_heads_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The definition of `quantize_heads`: what its kernel is compared with."""
    _check(q, k, v, cu_q, cu_k)
    made, scales = [], []
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        rows = torch.arange(cu.shape[0] - 1, device=x.device).repeat_interleave(cu.diff())
        grouped = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (k.shape[1], -1))
        peaks = grouped.new_zeros(cu.shape[0] - 1, k.shape[1])
        if len(rows):
            of_token = grouped.abs().amax((2, 3))
            peaks = peaks.scatter_reduce(0, rows[:, None].expand_as(of_token), of_token, "amax")
        scale = peaks / LARGEST
        each = scale.clamp_min(torch.finfo(torch.float32).tiny)[rows][:, :, None, None]
        made.append((grouped / each).clamp(-LARGEST, LARGEST).to(CODES).reshape(x.shape).contiguous())
        scales.append(scale.float())
    return made[0], made[1], made[2], torch.stack(scales)


def _quantize_heads_fake(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(q, k, v, cu_q, cu_k)
    codes = [x.new_empty(x.shape, dtype=CODES) for x in (q, k, v)]
    scales = q.new_empty(3, cu_q.shape[0] - 1, k.shape[1], dtype=torch.float32)
    return codes[0], codes[1], codes[2], scales


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    torch._check(
        q.dim() == 3 and k.dim() == 3 and v.dim() == 3,
        lambda: f"quantize_heads: q, k and v must be [T, H, D], got {q.dim()}, {k.dim()} and {v.dim()} dimensions",
    )
    torch._check(q.dtype == k.dtype and q.dtype == v.dtype, lambda: "quantize_heads: q, k and v must be of one dtype")
    torch._check(
        k.shape == v.shape and k.shape[2] == q.shape[2],
        lambda: "quantize_heads: k and v must be alike, with heads of q's size",
    )
    torch._check(
        q.shape[1] % k.shape[1] == 0,
        lambda: f"quantize_heads: {q.shape[1]} query heads are no multiple of {k.shape[1]} key heads",
    )
    torch._check(
        cu_q.dtype == torch.int32 and cu_k.dtype == torch.int32 and cu_q.dim() == 1 and cu_k.shape == cu_q.shape,
        lambda: "quantize_heads: cu_q and cu_k must be int32 beside q and as long as each other",
    )


_quantize_heads = declare(
    "quantize_heads(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, SymInt longest_q, SymInt longest_k) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=quantize_heads_reference,
    fake=_quantize_heads_fake,
)
