"""Attention to a part of the keys, and how parts are merged: what ranks compute whose keys and values go around.

Softmax over all keys is the mean of the softmax over each part, weighted by the part's sum of exponentials
(https://arxiv.org/abs/2310.01889). A part therefore comes with the logarithm of that sum.

T packed tokens, H query heads, K key/value heads (H is a multiple of K), D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.config.backends import AUTO, BACKENDS, Use, candidates, lack, refused
from omni_grpc.ops.attention_kernels import Offsets


class AttentionPart(NamedTuple):
    """What queries get of some keys: out [T, H, D], and the log of the sum of exponentials of their scores, [T, H], at
    least float32. A query without keys has zeros and -inf.
    """

    out: Tensor
    lse: Tensor


PartKernel = Callable[[Tensor, Tensor, Tensor, Offsets, float], AttentionPart]


def attend_part(
    q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, backend: str = AUTO, use: Use | None = None
) -> AttentionPart:
    """`varlen_attention` of q [Tq, H, D] to a part of the keys, k and v [Tk, K, D], not causal. `use`: as in
    `part_backend`; None: any backend can run.
    """
    if q.shape[0] == 0 or k.shape[0] == 0:
        wide = torch.promote_types(q.dtype, torch.float32)
        return AttentionPart(torch.zeros_like(q), q.new_full(q.shape[:2], float("-inf"), dtype=wide))
    name = SDPA if use is None else part_backend(backend, use)
    return _KERNELS[name](q, k, v, offsets.of(backend), scale)


def merge(a: AttentionPart, b: AttentionPart) -> AttentionPart:
    """What queries get of the keys of both. In the dtype of the logs, so that many parts can be merged."""
    lse = _log_of_sum(a.lse, b.lse)
    # a query that has seen no key yet: both weights are exp(-inf)
    total = torch.where(lse.isneginf(), 0.0, lse)
    out = sum(part.out.to(lse.dtype) * (part.lse - total).exp()[..., None] for part in (a, b))
    assert isinstance(out, Tensor)
    return AttentionPart(out, lse)


def _log_of_sum(a: Tensor, b: Tensor) -> Tensor:
    """`torch.logaddexp`, but of a number in the same place of any batch the same bits: on a CPU that one computes what
    fills no vector at the end of a tensor in another way.
    """
    most, least = torch.maximum(a, b), torch.minimum(a, b)
    return torch.where(most.isneginf(), most, most + (least - most).exp().log1p())


def part_backend(backend: str, use: Use) -> str:
    """The backend that computes parts where `backend` (a canonical name, with or without a form) is asked for: itself,
    or if it is "auto" the first that can. Raises ConfigError for one that does not give the logs.
    """
    plain = backend.partition(" ")[0]
    found = [name for name in candidates(plain, use.device) if name in _KERNELS and not lack(BACKENDS[name], use)]
    if found:
        return found[0]
    if plain == AUTO:
        return SDPA
    message = (
        f"{plain} gives no log-sum-exp, which a ring merges parts by; use {', '.join(_KERNELS)} or {AUTO}, or let "
        "ranks fetch keys and values by sequence_parallel_size in place of ring_degree"
    )
    raise refused("ring_degree", message, "NOT_SUPPORTED")


def _sdpa(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float) -> AttentionPart:
    """torch's kernels behind SDPA, one call for each run of rows of equal lengths."""
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, n, m, _, at_q, at_k in offsets.runs():
        if m == 0:
            continue
        of_q, of_k = slice(at_q, at_q + rows * n), slice(at_k, at_k + rows * m)
        batch = [x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q[of_q], k[of_k], v[of_k])]
        groups = q.shape[1] // k.shape[1]
        bq, bk, bv = batch[0], *(x.repeat_interleave(groups, 1) if groups > 1 else x for x in batch[1:])
        made, logs = _sdpa_batch(bq, bk, bv, scale)
        out[of_q] = made.transpose(1, 2).flatten(0, 1)
        lse[of_q] = logs[:, :, :n].transpose(1, 2).flatten(0, 1)
    return AttentionPart(out, lse)


def _sdpa_batch(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[B, H, n, D] -> [B, H, n, D] and the logs [B, H, n or more]."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
        return out, lse
    # the kernel reads heads of whole vectors; zeros change no score
    short, size = -q.shape[3] % 8, q.shape[3]
    q, k, v = (F.pad(x, (0, short)) if short else x for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
    return out[..., :size], lse


def _flash_2(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float) -> AttentionPart:
    """torch's FlashAttention 2, one call for all rows."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, offsets.cu_q, offsets.cu_k, offsets.longest_q, offsets.longest_k, 0.0, False, False, scale=scale
    )
    return _without_keys(out, lse.T, offsets)


def _flash_3(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float) -> AttentionPart:
    """FlashAttention 3, one call for all rows."""
    from fa3_fwd_interface import fa3_fwd_cuda  # a package that may be missing

    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse, *_ = fa3_fwd_cuda.fwd.default(
        q,
        k,
        v,
        softmax_scale=scale,
        is_causal=False,
        num_splits=1,
        cu_seqlens_q=offsets.cu_q,
        cu_seqlens_k=offsets.cu_k,
        max_seqlen_q=offsets.longest_q,
        max_seqlen_k=offsets.longest_k,
    )
    return _without_keys(out, lse.T, offsets)


def _without_keys(out: Tensor, lse: Tensor, offsets: Offsets) -> AttentionPart:
    """Kernels give +inf, or what was there before, where a row has no keys. lse: [T, H]."""
    rows = torch.arange(len(out), device=out.device)
    row = torch.bucketize(rows, offsets.cu_q[1:], right=True, out_int32=True)
    empty = (offsets.cu_k.diff() == 0).index_select(0, row)[:, None]
    return AttentionPart(out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, float("-inf")))


SDPA = "TORCH_SDPA"
_KERNELS: Mapping[str, PartKernel] = {"FLASH_ATTN_3": _flash_3, "FLASH_ATTN_2": _flash_2, SDPA: _sdpa}
