"""Attention of packed rows by a kernel of our own for CPUs: one call for all rows, whatever their lengths.

Shapes: T packed tokens, H query heads, K key/value heads (H is a multiple of K), D head size, R rows.
"""

from __future__ import annotations

from torch import Tensor

from omni_grpc.ops.attention_kernels import Offsets, sdpa
from omni_grpc.ops.declare import op
from omni_grpc.ops.packed import check_packed


def packed(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """The backend `OMNI_CPU`, see `attention_kernels`: q [Tq, H, D], k and v [Tk, K, D] -> [Tq, H, D]."""
    return attention_cpu(q, k, v, offsets.cu_q, offsets.cu_k, scale, causal)


def _fake(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: object) -> Tensor:
    check_packed("attention_cpu", q, k, v, cu_q, cu_k)
    return q.new_empty(q.shape)


@op(fake=_fake)
def attention_cpu(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, causal: bool) -> Tensor:
    """softmax(scale * q k^T) v of each row, as `attention.varlen_attention` says. q: [Tq, H, D]. k, v: [Tk, K, D].
    cu_q, cu_k: int32 [R + 1], from 0 to Tq and Tk. Returns a new contiguous [Tq, H, D].

    Online softmax over blocks of 64 keys, all in float32 (https://arxiv.org/abs/2205.14135). Rows come out alike in any
    batch, bit for bit. A query that is not finite gives NaN, as it does by the formula. RuntimeError for shapes,
    offsets and dtypes other than these; the kernel takes float32 and bfloat16.
    """
    check_packed("attention_cpu", q, k, v, cu_q, cu_k)
    if q.shape[0] == 0 or k.shape[0] == 0:
        return q.new_zeros(q.shape)
    longest_q, longest_k = (int(cu.diff().max()) for cu in (cu_q, cu_k))
    offsets = Offsets(cu_q=cu_q, cu_k=cu_k, longest_q=longest_q, longest_k=longest_k)
    return sdpa(q, k, v, offsets, scale, causal).contiguous()
