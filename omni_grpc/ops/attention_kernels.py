"""The functions behind `config.backends`, each attention of packed rows.

    run(q, k, v, offsets, scale, causal) -> out

q: [Tq, H, D]. k, v: [Tk, K, D]. `out`: [Tq, H, D], of any strides. What they compute is what `varlen_attention` says, a
row without keys and a query that sees none included. They get neither Tq nor Tk of 0, and only what their row of the
table takes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.config.backends import INVARIANT
from omni_grpc.ops.attention_q import attention_q, attention_quantize, with_whole_heads
from omni_grpc.ops.heads import FLOAT8, QuantizedHeads, quantize_heads

WEIGHT_SCALE = 256.0
"""FlashAttention 3 multiplies the softmax weights, of which the largest is 1, by this to make better use of e4m3."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Offsets:
    """Where the rows lie: int32 [R + 1] beside the tensors, bounds of a row's length, and where the caller has them the
    same offsets in the host's memory. `row_by_row`: every row is a run of its own.
    """

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    host_q: Tensor | None = None
    host_k: Tensor | None = None
    row_by_row: bool = False

    def of(self, kernel: str) -> Offsets:
        """As a kernel of `backends.kernels_of` needs them."""
        return dataclasses.replace(self, row_by_row=True) if kernel.endswith(INVARIANT) else self

    def lengths(self) -> list[tuple[int, int]]:
        """Queries and keys of each row. Waits like `runs`."""
        both = ((self.cu_q, self.host_q), (self.cu_k, self.host_k))
        queries, keys = ((cu if host is None else host).diff().tolist() for cu, host in both)
        return list(zip(queries, keys, strict=True))

    def whole(self, q: Tensor, k: Tensor) -> int:
        """The number of rows if all are alike and one run, else 0. Reads only shapes: q [Tq, H, D], k [Tk, K, D]."""
        rows = self.cu_q.shape[0] - 1
        return rows if self.alike(q, k) and (rows == 1 or not self.row_by_row) else 0

    def alike(self, q: Tensor, k: Tensor) -> bool:
        """Whether all rows of q [Tq, H, D] and k [Tk, K, D] have equal lengths. Reads only shapes, never offsets."""
        rows = self.cu_q.shape[0] - 1
        return rows * self.longest_q == q.shape[0] and rows * self.longest_k == k.shape[0]

    def runs(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """(rows, queries and keys per row, first row, query and key) of each run of neighbours of equal lengths that
        has queries. Waits for a CUDA device where the offsets are only there.
        """
        row = at_q = at_k = 0
        lengths = self.lengths()
        runs = ((1, *each) for each in lengths) if self.row_by_row else _runs(lengths)
        for rows, n, m in runs:
            if n:
                yield rows, n, m, row, at_q, at_k
            row, at_q, at_k = row + rows, at_q + rows * n, at_k + rows * m


def _runs(lengths: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    for (n, m), run in itertools.groupby(lengths):
        yield sum(1 for _ in run), n, m


def sdpa(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """torch's SDPA, the reference for all kernels: q [Tq, H, D], k and v [Tk, K, D] -> [Tq, H, D]."""
    return _run_by_equal_lengths(_sdpa_batch, q, k, v, offsets, scale, causal)


def cudnn(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """cuDNN: q [Tq, H, D], k and v [Tk, K, D] -> [Tq, H, D]. It refuses a single key; softmax is 1 then, so every query
    that sees the key gets its value.
    """
    return _run_by_equal_lengths(_cudnn_batch, q, k, v, offsets, scale, causal)


def flash_2(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """torch's FlashAttention 2, one call for all rows: q [Tq, H, D], k and v [Tk, K, D] -> [Tq, H, D]."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, offsets.cu_q, offsets.cu_k, offsets.longest_q, offsets.longest_k, 0.0, causal, False, scale=scale
    )[0]
    return out


def flash_3_fp8(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """`flash_3` of q [Tq, H, D], k and v [Tk, K, D] quantized to e4m3 -> [Tq, H, D] in q's dtype."""
    return flash_3_quantized(_quantized(q, k, v, offsets), offsets, scale, causal).to(q.dtype)


def flash_3_fp8_apart(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """`flash_3_apart` of q [Tq, H, D], k and v [Tk, K, D] quantized to e4m3 -> [Tq, H, D] in q's dtype."""
    return flash_3_quantized_apart(_quantized(q, k, v, offsets), offsets, scale, causal).to(q.dtype)


def flash_3_quantized(quantized: QuantizedHeads, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """In bfloat16."""
    return flash_3(quantized.q, quantized.k, quantized.v, offsets, scale, causal, quantized.scales)


def flash_3_quantized_apart(quantized: QuantizedHeads, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """In bfloat16."""
    return flash_3_apart(quantized.q, quantized.k, quantized.v, offsets, scale, causal, quantized.scales)


def _quantized(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets) -> QuantizedHeads:
    return quantize_heads(q, k, v, offsets.cu_q, offsets.cu_k, offsets.longest_q, offsets.longest_k)


def flash_3(
    q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool, scales: Tensor | None = None
) -> Tensor:
    """FlashAttention 3, one call for all rows -> [Tq, H, D]. scales: float32 [3, R, K], where q, k and v are e4m3."""
    return _flash_3(
        q,
        k,
        v,
        scale,
        causal,
        scales,
        cu_seqlens_q=offsets.cu_q,
        cu_seqlens_k=offsets.cu_k,
        max_seqlen_q=offsets.longest_q,
        max_seqlen_k=offsets.longest_k,
    )


def flash_3_apart(
    q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool, scales: Tensor | None = None
) -> Tensor:
    """`flash_3` with one call for each run of rows of equal lengths -> [Tq, H, D]. The kernel for whole batches has
    less to look up, and values that are not finite stay in their row.
    """
    if rows := offsets.whole(q, k):
        bq, bk, bv = (x.view(rows, -1, *x.shape[1:]) for x in (q, k, v))
        return _flash_3(bq, bk, bv, scale, causal, scales).view(q.shape)
    out = torch.empty(q.shape, dtype=q.dtype if scales is None else torch.bfloat16, device=q.device)
    for rows, n, m, row, at_q, at_k in offsets.runs():
        into = out[at_q : at_q + rows * n].view(rows, n, *out.shape[1:])
        if m == 0:
            into.zero_()
            continue
        bq = q[at_q : at_q + rows * n].unflatten(0, (rows, n))
        bk, bv = (x[at_k : at_k + rows * m].unflatten(0, (rows, m)) for x in (k, v))
        _flash_3(bq, bk, bv, scale, causal, None if scales is None else scales[:, row : row + rows], out=into)
    return out


def _flash_3(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, scales: Tensor | None, **more: Any) -> Tensor:
    """The kernel's own op: the package's functions around it take the host longer than a small attention the GPU. One
    split, so that keys are summed up in the same order whatever else there is.
    """
    from fa3_fwd_interface import fa3_fwd_cuda  # a package that may be missing

    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if scales is not None:
        more |= dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    out: Tensor = fa3_fwd_cuda.fwd.default(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1, **more)[0]
    return out


def fp8_emulated(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """`flash_3_fp8` by `quantized_reference`: q [Tq, H, D], k and v [Tk, K, D] -> [Tq, H, D] in q's dtype."""
    return quantized_reference(_quantized(q, k, v, offsets), offsets, scale, causal).to(q.dtype)


def quantized_reference(quantized: QuantizedHeads, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """What `flash_3_quantized` computes, in float32: the softmax weights are rounded to e4m3 before they multiply the
    values, and summed before they are rounded (https://arxiv.org/abs/2407.08608, section 3.3). The kernel scales by the
    largest score of the keys seen so far, this one by the largest of all.
    """
    q, k, v = (x.float() for x in quantized[:3])
    out, groups, at_q, at_k = torch.zeros_like(q), q.shape[1] // k.shape[1], 0, 0
    for row, (n, m) in enumerate(offsets.lengths()):
        if n and m:
            of_q, of_k = slice(at_q, at_q + n), slice(at_k, at_k + m)
            q_scale, k_scale, v_scale = quantized.scales[:, row].repeat_interleave(groups, 1)
            keys, values = (x[of_k].repeat_interleave(groups, 1) for x in (k, v))
            scores = torch.einsum("nhd,mhd->hnm", q[of_q], keys) * (scale * q_scale * k_scale)[:, None, None]
            if causal:
                hidden = ~torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
                scores = scores.masked_fill(hidden, float("-inf"))
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            rounded = (weights * WEIGHT_SCALE).to(FLOAT8).float() / WEIGHT_SCALE
            summed = torch.einsum("hnm,mhd->hnd", rounded, values) / weights.sum(-1, keepdim=True)
            result = (summed * v_scale[:, None, None]).transpose(0, 1)
            if causal and n > m:
                result[: n - m] = 0  # they see no key
            out[of_q] = result
        at_q, at_k = at_q + n, at_k + m
    return out


def int8(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """`attention_q`, heads zero-padded to 128 channels: q [Tq, H, D], k, v [Tk, K, D] -> [Tq, H, D] in q's dtype."""
    size, dtype = q.shape[2], torch.bfloat16 if q.is_cuda else q.dtype
    mine, keys, values = (with_whole_heads(x.to(dtype)) for x in (q, k, v))
    quantized = attention_quantize(mine, keys, values, offsets.cu_q, offsets.cu_k)
    out = attention_q(quantized, offsets.cu_q, offsets.cu_k, q.shape[0], scale)
    return out[..., :size].to(q.dtype)


def sage(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """SageAttention, one call for each run of rows of equal lengths: q [Tq, H, D], k and v [Tk, K, D] -> [Tq, H, D].
    Its function for packed rows subtracts one mean of keys from all of them, so that rows would influence each other.
    """
    from sageattention import sageattn  # a package that may be missing

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        out: Tensor = sageattn(q, k, v, tensor_layout="HND", is_causal=causal, sm_scale=scale)
        return out

    return _run_by_equal_lengths(attend, q, k, v, offsets, scale, causal)


BatchAttention = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]


def _run_by_equal_lengths(
    attend: BatchAttention, q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool
) -> Tensor:
    """Each run of rows of equal lengths as one batch: q [B, H, n, D], k and v [B, K, m, D], of which m is not 0."""
    parts = []
    rows = offsets.whole(q, k)
    runs = [(rows, offsets.longest_q, offsets.longest_k, 0, 0, 0)] if rows else offsets.runs()
    for rows, n, m, _, at_q, at_k in runs:
        of_q, of_k = slice(at_q, at_q + rows * n), slice(at_k, at_k + rows * m)
        if m == 0:
            parts.append(torch.zeros_like(q[of_q]))
            continue
        bq, bk, bv = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q[of_q], k[of_k], v[of_k]))
        parts.append(attend(bq, bk, bv, scale, causal).transpose(1, 2).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sdpa_batch(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    n, m = q.shape[2], k.shape[2]
    if causal and n > m:
        # SDPA leaves open what a query without keys gives
        seeing = _sdpa_batch(q[:, :, n - m :], k, v, scale, causal)
        return torch.cat([torch.zeros_like(q[:, :, : n - m]), seeing], 2)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=_mask(n, m, q.device) if causal and n != m else None,
        is_causal=causal and n == m,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _mask(n: int, m: int, device: torch.device) -> Tensor:
    """bool [n, m]: the last query sees all keys."""
    return torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)


def _cudnn_batch(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    n, m = q.shape[2], k.shape[2]
    if m > 1 and causal and n > m:
        seeing = _cudnn_batch(q[:, :, n - m :], k, v, scale, causal)
        return torch.cat([torch.zeros_like(q[:, :, : n - m]), seeing], 2)
    if m > 1:
        bias = None
        if causal and n != m:
            bias = torch.zeros(n, m, dtype=q.dtype, device=q.device).masked_fill_(~_mask(n, m, q.device), -torch.inf)
        # not by torch.nn.attention.sdpa_kernel: that is for the whole process, and another lane may decode meanwhile,
        # with heads that cuDNN does not have
        out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, bias, False, 0.0, causal and n == m, False, scale=scale
        )[0]
        return out
    # causal, the last query alone sees the one key
    alone = v.expand_as(q)
    return torch.cat([torch.zeros_like(q[:, :, 1:]), alone[:, :, :1]], 2) if causal and n > 1 else alone
