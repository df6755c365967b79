"""The attention family: softmax attention over packed rows.

Shapes: T packed tokens, H query heads, K key/value heads (H is a multiple of K), D head size, R rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.library import NAMESPACE, declare

FLASH_DTYPES = frozenset({torch.float16, torch.bfloat16})
FLASH_CAPABILITY = (8, 0)
FLASH_HEAD_SIZE = 256


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attention of each row's queries to the same row's keys: softmax(scale * q k^T) v.

    q: [Tq, H, D]. k, v: [Tk, K, D]; query head h reads key/value head h // (H / K). cu_q, cu_k: int32 [R + 1], the
    offsets of the rows, which may differ in length; longest_*: upper bounds of a row's length. With `causal`, the last
    query of a row sees all of its keys, the one before it all but the last, and so on; a query that sees no key gives
    zeros, as does a row without keys. Returns a new contiguous [Tq, H, D].

    On CUDA, float16 and bfloat16 run as one flash-attention call. Everything else is the reference, which reads cu on
    the host: free on the CPU, a synchronisation of the device on CUDA.
    """
    out: Tensor = _varlen_attention(q, k, v, cu_q, cu_k, longest_q, longest_k, scale, causal)
    return out


def varlen_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """The definition of `varlen_attention`. Neighbouring rows of equal lengths are one [B, S] batch of torch's SDPA."""
    _check(q, k, v, cu_q, cu_k)
    parts = [
        _like_rows(q[at_q : at_q + rows * n], k[at_k : at_k + rows * m], v[at_k : at_k + rows * m], rows, scale, causal)
        for rows, n, m, at_q, at_k in _like_neighbours(cu_q, cu_k)
    ]
    if not parts:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _like_neighbours(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
    """(rows, queries and keys per row, first query, first key) of each run of neighbours of equal lengths."""
    at_q = at_k = 0
    for (n, m), run in itertools.groupby(zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)):
        rows = sum(1 for _ in run)
        if n:
            yield rows, n, m, at_q, at_k
        at_q, at_k = at_q + rows * n, at_k + rows * m


def _like_rows(q: Tensor, k: Tensor, v: Tensor, rows: int, scale: float, causal: bool) -> Tensor:
    if k.shape[0] == 0:
        return torch.zeros_like(q)
    batch_q, batch_k, batch_v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))
    n, m = batch_q.shape[2], batch_k.shape[2]
    mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n) if causal and n != m else None
    out = F.scaled_dot_product_attention(
        batch_q,
        batch_k,
        batch_v,
        attn_mask=mask,
        is_causal=causal and n == m,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if mask is not None and n > m:
        # SDPA leaves open what a query without keys gives
        out[:, :, : n - m] = 0
    return out.transpose(1, 2).flatten(0, 1)


def _varlen_attention_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
) -> Tensor:
    flash = (
        q.dtype in FLASH_DTYPES
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= FLASH_HEAD_SIZE
        and torch.cuda.get_device_capability(q.device) >= FLASH_CAPABILITY
    )
    if not flash:
        return varlen_attention_reference(q, k, v, cu_q, cu_k, longest_q, longest_k, scale, causal)
    _check(q, k, v, cu_q, cu_k)
    if q.shape[0] == 0 or k.shape[0] == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, longest_q, longest_k, 0.0, causal, False, scale=scale
    )[0]
    return out.contiguous()


def _varlen_attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
) -> Tensor:
    _check(q, k, v, cu_q, cu_k)
    return q.new_empty(q.shape)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    torch._check(
        q.dim() == 3 and k.dim() == 3 and v.dim() == 3,
        lambda: f"varlen_attention: q, k, v must be [T, H, D], got {q.dim()}, {k.dim()} and {v.dim()} dimensions",
    )
    torch._check(
        k.shape == v.shape,
        lambda: f"varlen_attention: k is {tuple(k.shape)} and v {tuple(v.shape)}; they must be alike",
    )
    torch._check(
        q.shape[2] == k.shape[2], lambda: f"varlen_attention: head sizes differ: q {q.shape[2]}, k {k.shape[2]}"
    )
    torch._check(
        q.shape[1] % k.shape[1] == 0,
        lambda: f"varlen_attention: {q.shape[1]} query heads are no multiple of {k.shape[1]} key heads",
    )
    torch._check(
        q.dtype == k.dtype and q.dtype == v.dtype,
        lambda: f"varlen_attention: q is {q.dtype}, k {k.dtype} and v {v.dtype}; they must be alike",
    )
    torch._check(
        cu_q.dtype == torch.int32 and cu_k.dtype == torch.int32 and cu_q.dim() == 1 and cu_k.shape == cu_q.shape,
        lambda: "varlen_attention: cu_q and cu_k must be int32 and as long as each other",
    )


_varlen_attention = declare(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, SymInt longest_q, SymInt longest_k, "
    "float scale, bool causal) -> Tensor",
    reference=varlen_attention_reference,
    fake=_varlen_attention_fake,
)
torch.library.impl(f"{NAMESPACE}::varlen_attention", "cuda", _varlen_attention_cuda)
