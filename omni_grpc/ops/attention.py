"""The attention family: softmax attention over packed rows.

Shapes: T packed tokens, H query heads, K key/value heads (H is a multiple of K), D head size, R rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from omni_grpc.config.backends import AUTO, Use, kernel_for, kernels_of
from omni_grpc.ops.attention_choice import RowSizes, fastest, function
from omni_grpc.ops.attention_kernels import Offsets
from omni_grpc.ops.declare import Size, directly, op
from omni_grpc.ops.heads import QuantizedHeads
from omni_grpc.ops.library import NAMESPACE, kernels_on
from omni_grpc.ops.packed import check_packed

OP = "varlen_attention"


def _dispatched(q: Tensor) -> bool:
    """It is Python on every device, so the dispatcher is for those who have to see the op."""
    return not directly(q)


def _fake(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: object) -> Tensor:
    check_packed(OP, q, k, v, cu_q, cu_k)
    return q.new_empty(q.shape)


@op(kernel_if=_dispatched, of=("q",), fake=_fake)
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: Size,
    longest_k: Size,
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

    What is not finite stays in its row, but for backends whose entry in the table says otherwise. A NaN reaches every
    query that sees it; with `causal` it may reach others of its row too, whose weight for it is 0, as in torch's SDPA.

    `backend` is a name of `config.backends`, with or without a form; one that cannot do this raises ConfigError.
    What it leaves open, and "auto" leaves all, is the fastest by the times of ops.tuning for rows like these. host_q,
    host_k: cu_q and cu_k in the host's memory, for backends that start a kernel for each run of like rows: without
    them those wait for the device.
    """
    check_packed(OP, q, k, v, cu_q, cu_k)
    if q.shape[0] == 0 or k.shape[0] == 0:
        candidate_kernels(backend, q.device, q.dtype, q.shape[2], causal, q.shape[1] != k.shape[1])
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    offsets = Offsets(cu_q=cu_q, cu_k=cu_k, longest_q=longest_q, longest_k=longest_k, host_q=host_q, host_k=host_k)
    kernel = _kernel(backend, q.dtype, q, k, offsets, causal)
    out: Tensor = function(kernel_for(kernel))(q, k, v, offsets.of(kernel), scale, causal)
    return out.contiguous()


def _quantized_fake(q: Tensor, k: Tensor, v: Tensor, _: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any) -> Tensor:
    check_packed(OP, q, k, v, cu_q, cu_k)
    return q.new_empty(q.shape, dtype=rest[4])


@op(kernel_if=_dispatched, of=("q",), fake=_quantized_fake)
def varlen_attention_quantized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: Size,
    longest_k: Size,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
    backend: str = AUTO,
    host_q: Tensor | None = None,
    host_k: Tensor | None = None,
) -> Tensor:
    """`varlen_attention` of QuantizedHeads: q [Tq, H, D], k and v [Tk, K, D] in e4m3, scales float32 [3, R, K]. Returns
    [Tq, H, D] in `dtype`, which the heads had before quantization. `backend` must be one that takes quantized heads.
    """
    check_packed(OP, q, k, v, cu_q, cu_k)
    if q.shape[0] == 0 or k.shape[0] == 0:
        return q.new_zeros(q.shape, dtype=dtype)
    offsets = Offsets(cu_q=cu_q, cu_k=cu_k, longest_q=longest_q, longest_k=longest_k, host_q=host_q, host_k=host_k)
    kernel = _kernel(backend, dtype, q, k, offsets, causal)
    run, heads = function(kernel_for(kernel, quantized=True)), QuantizedHeads(q, k, v, scales)
    out: Tensor = run(heads, offsets.of(kernel), scale, causal)
    return out.to(dtype).contiguous()


# CUDA has the same Python function: the table of backends says what runs there
torch.library.impl(f"{NAMESPACE}::varlen_attention", "CUDA", varlen_attention.reference)
torch.library.impl(f"{NAMESPACE}::varlen_attention_quantized", "CUDA", varlen_attention_quantized.reference)


def use_of(device: torch.device, dtype: torch.dtype, head_size: int, *, causal: bool, grouped: bool) -> Use:
    """The query for the table of backends."""
    return Use(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=str(dtype).removeprefix("torch."),
        head_size=head_size,
        causal=causal,
        grouped=grouped,
        kernels=kernels_on(device.type),
    )


def _kernel(backend: str, dtype: torch.dtype, q: Tensor, k: Tensor, offsets: Offsets, causal: bool) -> str:
    """The kernel for queries, keys and values that come in that precision."""
    named = candidate_kernels(backend, q.device, dtype, q.shape[2], causal, q.shape[1] != k.shape[1])
    if len(named) == 1:
        return named[0]
    count = offsets.cu_q.shape[0] - 1
    return fastest(
        named, RowSizes(count, offsets.alike(q, k), q.shape[0] // count, k.shape[0] // count), q, k.shape[1], causal
    )


def candidate_kernels(
    backend: str, device: torch.device, dtype: torch.dtype, head_size: int, causal: bool, grouped: bool
) -> tuple[str, ...]:
    """The kernels of a backend there, see `backends.kernels_of`. Cached, since it searches for installed packages."""
    return _candidate_kernels(backend, device, dtype, head_size, causal, grouped)


# compiled blocks must not trace through the search for packages
torch.compiler.assume_constant_result(candidate_kernels)


@functools.lru_cache(maxsize=1024)
def _candidate_kernels(
    backend: str, device: torch.device, dtype: torch.dtype, head_size: int, causal: bool, grouped: bool
) -> tuple[str, ...]:
    return kernels_of(backend, use_of(device, dtype, head_size, causal=causal, grouped=grouped))
