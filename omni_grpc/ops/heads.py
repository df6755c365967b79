"""The heads family: queries, keys and values of packed rows quantized to e4m3, with one scale for each head of each
row: the inputs of FlashAttention 3 in fp8.

Shapes: T packed tokens, H query heads, K key/value heads (H is a multiple of K), D head size, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from omni_grpc.ops.declare import Size, has_kernel_dtype, op
from omni_grpc.ops.packed import check_packed

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0


class QuantizedHeads(NamedTuple):
    """q [Tq, H, D], k and v [Tk, K, D] in e4m3: x is about value * scale. scales: float32 [3, R, K], of q, k and v;
    the H / K query heads that share a key head share a scale.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scales: Tensor


def quantize_heads(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int
) -> QuantizedHeads:
    """q [Tq, H, D], k and v [Tk, K, D], of one dtype, in e4m3.

    cu_q, cu_k: int32 [R + 1], the offsets of the rows; longest_*: upper bounds of a row's length. A scale is the
    largest magnitude of a row's head over 448: 0 for zeros, and where it is not finite all values that it scales are
    NaN. Raises RuntimeError where shapes, dtypes or devices disagree.
    """
    return QuantizedHeads(*quantize_heads_op(q, k, v, cu_q, cu_k, longest_q, longest_k))


def _fake(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_packed("quantize_heads", q, k, v, cu_q, cu_k)
    values = [x.new_empty(x.shape, dtype=FLOAT8) for x in (q, k, v)]
    scales = q.new_empty(3, cu_q.shape[0] - 1, k.shape[1], dtype=torch.float32)
    return values[0], values[1], values[2], scales


@op(kernel_if=has_kernel_dtype, of=("q",), fake=_fake)
def quantize_heads_op(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: Size, longest_k: Size
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_heads` of q [Tq, H, D], k and v [Tk, K, D]: the parts of QuantizedHeads, in order."""
    check_packed("quantize_heads", q, k, v, cu_q, cu_k)
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
        made.append((grouped / each).clamp(-LARGEST, LARGEST).to(FLOAT8).reshape(x.shape).contiguous())
        scales.append(scale.float())
    return made[0], made[1], made[2], torch.stack(scales)
