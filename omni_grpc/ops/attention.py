"""The attention family: softmax attention over packed rows.

Shapes: T packed tokens, H query heads, K key/value heads (H is a multiple of K), D head size, R rows.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from omni_grpc.config.backends import AUTO, Use, run_of, ways
from omni_grpc.ops.attention_choice import Rows, fastest, function
from omni_grpc.ops.attention_kernels import Offsets
from omni_grpc.ops.heads import CodedHeads
from omni_grpc.ops.library import NAMESPACE, declare, directly, kernels_on
from omni_grpc.ops.packed import check_packed

OP = "varlen_attention"


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
    backend: str = AUTO,
    host_q: Tensor | None = None,
    host_k: Tensor | None = None,
) -> Tensor:
    """Attention of each row's queries to the same row's keys: softmax(scale * q k^T) v.

    q: [Tq, H, D]. k, v: [Tk, K, D]; query head h reads key/value head h // (H / K). cu_q, cu_k: int32 [R + 1], the
    offsets of the rows, which may differ in length; longest_*: upper bounds of a row's length. With `causal`, the last
    query of a row sees all of its keys, the one before it all but the last, and so on; a query that sees no key gives
    zeros, as does a row without keys. Returns a new contiguous [Tq, H, D].

    `backend` is a name of `config.backends`, with or without a form; one that cannot do this raises ConfigError.
    What it leaves open, and "auto" leaves all, is the fastest by the times of ops.tuning for rows like these. host_q,
    host_k: cu_q and cu_k in the host's memory, for backends that start a kernel for each run of like rows: without
    them those wait for the device.
    """
    call = attend if directly(q) else _varlen_attention
    out: Tensor = call(q, k, v, cu_q, cu_k, longest_q, longest_k, scale, causal, backend, host_q, host_k)
    return out


def varlen_attention_coded(
    given: CodedHeads,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
    backend: str,
    host_q: Tensor | None = None,
    host_k: Tensor | None = None,
) -> Tensor:
    """`varlen_attention` of queries, keys and values that are in 8 bits already, by a backend that has them so; `dtype`
    is what the result has, and what they had.
    """
    call = attend_coded if directly(given.q) else _varlen_attention_coded
    out: Tensor = call(*given, cu_q, cu_k, longest_q, longest_k, scale, causal, dtype, backend, host_q, host_k)
    return out


def use_of(device: torch.device, dtype: torch.dtype, head_size: int, *, causal: bool, grouped: bool) -> Use:
    """What the table of backends is asked."""
    return Use(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=str(dtype).removeprefix("torch."),
        head_size=head_size,
        causal=causal,
        grouped=grouped,
        kernels=kernels_on(device.type),
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
    backend: str = AUTO,
    host_q: Tensor | None = None,
    host_k: Tensor | None = None,
) -> Tensor:
    """`varlen_attention` without the dispatcher: the backend's own function."""
    check_packed(OP, q, k, v, cu_q, cu_k)
    if q.shape[0] == 0 or k.shape[0] == 0:
        ways_of(backend, q.device, q.dtype, q.shape[2], causal, q.shape[1] != k.shape[1])
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    offsets = Offsets(cu_q=cu_q, cu_k=cu_k, longest_q=longest_q, longest_k=longest_k, host_q=host_q, host_k=host_k)
    way = _way(backend, q.dtype, q, k, offsets, causal)
    out: Tensor = function(run_of(way))(q, k, v, offsets.of(way), scale, causal)
    return out.contiguous()


def attend_coded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
    backend: str = AUTO,
    host_q: Tensor | None = None,
    host_k: Tensor | None = None,
) -> Tensor:
    """`varlen_attention_coded` without the dispatcher."""
    check_packed(OP, q, k, v, cu_q, cu_k)
    if q.shape[0] == 0 or k.shape[0] == 0:
        return q.new_zeros(q.shape, dtype=dtype)
    offsets = Offsets(cu_q=cu_q, cu_k=cu_k, longest_q=longest_q, longest_k=longest_k, host_q=host_q, host_k=host_k)
    way = _way(backend, dtype, q, k, offsets, causal)
    out: Tensor = function(run_of(way, coded=True))(CodedHeads(q, k, v, scales), offsets.of(way), scale, causal)
    return out.to(dtype).contiguous()


def _way(backend: str, dtype: torch.dtype, q: Tensor, k: Tensor, offsets: Offsets, causal: bool) -> str:
    """What the attention is computed with, where queries, keys and values come in that precision."""
    named = ways_of(backend, q.device, dtype, q.shape[2], causal, q.shape[1] != k.shape[1])
    if len(named) == 1:
        return named[0]
    count = offsets.cu_q.shape[0] - 1
    return fastest(
        named, Rows(count, offsets.alike(q, k), q.shape[0] // count, k.shape[0] // count), q, k.shape[1], causal
    )


def ways_of(
    backend: str, device: torch.device, dtype: torch.dtype, head_size: int, causal: bool, grouped: bool
) -> tuple[str, ...]:
    """What a backend leaves open there, see `backends.ways`. Looked up once: it asks which packages there are."""
    return _ways_of(backend, device, dtype, head_size, causal, grouped)


# for blocks that are compiled: not to be traced through the search for packages
torch.compiler.assume_constant_result(ways_of)


@functools.lru_cache(maxsize=1024)
def _ways_of(
    backend: str, device: torch.device, dtype: torch.dtype, head_size: int, causal: bool, grouped: bool
) -> tuple[str, ...]:
    return ways(backend, use_of(device, dtype, head_size, causal=causal, grouped=grouped))


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
    backend: str = AUTO,
    host_q: Tensor | None = None,
    host_k: Tensor | None = None,
) -> Tensor:
    check_packed(OP, q, k, v, cu_q, cu_k)
    return q.new_empty(q.shape)


def _varlen_attention_coded_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
    backend: str = AUTO,
    host_q: Tensor | None = None,
    host_k: Tensor | None = None,
) -> Tensor:
    check_packed(OP, q, k, v, cu_q, cu_k)
    return q.new_empty(q.shape, dtype=dtype)


_varlen_attention = declare(
    "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, SymInt longest_q, SymInt longest_k, "
    "float scale, bool causal, str backend='auto', Tensor? host_q=None, Tensor? host_k=None) -> Tensor",
    reference=attend,
    fake=_varlen_attention_fake,
)
_varlen_attention_coded = declare(
    "varlen_attention_coded(Tensor q, Tensor k, Tensor v, Tensor scales, Tensor cu_q, Tensor cu_k, SymInt longest_q, "
    "SymInt longest_k, float scale, bool causal, ScalarType dtype, str backend='auto', Tensor? host_q=None, "
    "Tensor? host_k=None) -> Tensor",
    reference=attend_coded,
    fake=_varlen_attention_coded_fake,
)
# the same on CUDA: what runs there is the table's to say
torch.library.impl(f"{NAMESPACE}::varlen_attention", "cuda", attend)
torch.library.impl(f"{NAMESPACE}::varlen_attention_coded", "cuda", attend_coded)
