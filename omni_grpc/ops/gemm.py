"""The gemm family: products of rows in 8 bits, which is what a quantised linear layer computes.

Shapes: T tokens, K input channels, N output channels. A code stands for code * scale, with one scale for each token and
one for each output channel (see ops.quant), so that both leave the sum:
    out[t, n] = act(x_scale[t] * weight_scale[n] * sum over k of x[t, k] * weight[n, k] + bias[n])
as W8A8 of https://arxiv.org/abs/2208.07339, section 2.1, has it for int8 and https://arxiv.org/abs/2209.05433 for e4m3.
Scales are applied to the sum, in float32, so nothing overflows on the way that did not overflow in the codes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.library import NAMESPACE, declare
from omni_grpc.ops.quant import KERNEL_DTYPES, LARGEST

ACTS = ("none", "gelu_tanh")
FP8_CAPABILITY = (8, 9)
"""The least compute capability with products of float8 (https://docs.nvidia.com/cuda/ada-tuning-guide)."""

ALIGNMENT, FEWEST_ROWS = 16, 32
"""What torch's products of 8 bits want on CUDA: features in multiples of 16, and for int8 more than 16 rows. Few rows
are a rare case of scales by row, so float8 gets as many.
"""

EXACT_WEIGHTS = 1 << 20
"""Weights that the reference has in float64 at a time: 8 MiB of them."""


def gemm_q(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    act: str = "none",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x [T, K] and weight [N, K] in one dtype, torch.int8 or torch.float8_e4m3fn -> [T, N] in `dtype`.

    x_scale: float32 [T]. weight_scale: float32 [N]. bias: [N] of any floating dtype. act: "none", or "gelu_tanh", GELU
    with the tanh approximation. Sums of int8 are exact. Those of float8 are exact in the reference; on CUDA they are
    what its tensor cores make of them, and their order may change with T. But for that, a token's result depends on no
    other token. A row whose scale is NaN is NaN.
    Any T, N and K, zero included. Raises RuntimeError where shapes, dtypes or devices disagree.
    """
    served = x.is_cuda or (x.dtype == torch.int8 and dtype in KERNEL_DTYPES and _plain(bias))
    call = _gemm_q if served else gemm_q_reference
    out: Tensor = call(x, x_scale, weight, weight_scale, bias, act, dtype)
    return out


def _plain(bias: Tensor | None) -> bool:
    return bias is None or bias.dtype in KERNEL_DTYPES


def gemm_q_reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    act: str,
    dtype: torch.dtype,
) -> Tensor:
    """The definition. Sums of float8 are taken in float64, which holds all of them exactly: each product is a multiple
    of 2^-18 and at most 2^18, so 2^16 of them take 52 bits.
    """
    _check(x, x_scale, weight, weight_scale, bias, act, dtype)
    if x.dtype == torch.int8 and x.shape[1]:
        return _finished(torch._int_mm(x, weight.t()), x_scale, weight_scale, bias, act, dtype)
    chunk = max(1, EXACT_WEIGHTS // max(1, x.shape[1]))
    wide = x.double()
    sums = [wide @ part.double().t() for part in weight.split(chunk)]
    return _finished(torch.cat(sums, 1), x_scale, weight_scale, bias, act, dtype)


def gemm_q_fake(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    act: str,
    dtype: torch.dtype,
) -> Tensor:
    _check(x, x_scale, weight, weight_scale, bias, act, dtype)
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


def gemm_q_cuda(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    act: str,
    dtype: torch.dtype,
) -> Tensor:
    """By torch's own products (cuBLASLt, CUTLASS). What they do not take is padded with zeros, which add nothing."""
    _check(x, x_scale, weight, weight_scale, bias, act, dtype)
    tokens, channels = x.shape[0], weight.shape[0]
    if not tokens or not channels or not x.shape[1]:
        return _finished(x_scale.new_zeros(tokens, channels), x_scale, weight_scale, bias, act, dtype)
    fewer = max(FEWEST_ROWS - tokens, 0)
    if fewer:
        x, x_scale = F.pad(x.view(torch.uint8), (0, 0, 0, fewer)).view(x.dtype), F.pad(x_scale, (0, fewer))
    x, weight = _padded(x), _padded(weight, rows=True)
    with torch.cuda.device(x.device):
        if x.dtype == torch.int8:
            sums = torch._int_mm(x, weight.t())[:, :channels]
            out = _finished(sums, x_scale, weight_scale, bias, act, dtype)
        elif torch.cuda.get_device_capability(x.device) < FP8_CAPABILITY:
            out = gemm_q_reference(x, x_scale, weight[:channels], weight_scale, bias, act, dtype)
        else:
            out = _scaled(x, x_scale, weight, weight_scale, bias, act, dtype)
    return out[:tokens]


def _scaled(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    act: str,
    dtype: torch.dtype,
) -> Tensor:
    """Products of float8 with aligned features. Scales by row and column come with bfloat16 alone."""
    channels, more = weight_scale.shape[0], weight.shape[0] - weight_scale.shape[0]
    if dtype != torch.bfloat16:
        one = torch.ones((), device=x.device)
        sums = torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)[:, :channels]
        return _finished(sums, x_scale, weight_scale, bias, act, dtype)
    added = None if bias is None else F.pad(bias.to(torch.bfloat16), (0, more)).contiguous()
    out = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale.contiguous()[:, None],
        scale_b=F.pad(weight_scale, (0, more)).contiguous()[None],
        bias=added,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )[:, :channels]
    return F.gelu(out, approximate="tanh").contiguous() if act == "gelu_tanh" else out.contiguous()


def _padded(x: Tensor, *, rows: bool = False) -> Tensor:
    """With zeros to the right, so that columns are a multiple of ALIGNMENT, and below, where rows are to be one too."""
    right, below = -x.shape[1] % ALIGNMENT, -x.shape[0] % ALIGNMENT if rows else 0
    if not right and not below:
        return x.contiguous()
    # as bytes: not every operator of torch takes float8, and a zero is a zero
    return F.pad(x.view(torch.uint8), (0, right, 0, below)).view(x.dtype)


def _finished(
    sums: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, act: str, dtype: torch.dtype
) -> Tensor:
    """What becomes of sums [T, N], in float32."""
    out = sums.float() * x_scale[:, None] * weight_scale
    if bias is not None:
        out = out + bias.float()
    if act == "gelu_tanh":
        out = F.gelu(out, approximate="tanh")
    return out.to(dtype).contiguous()


def _check(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    act: str,
    dtype: torch.dtype,
) -> None:
    """With plain raises, as in ops.quant."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise RuntimeError(
            f"gemm_q: x must be [T, K] and weight [N, K], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype not in LARGEST or weight.dtype != x.dtype:
        raise RuntimeError(f"gemm_q: x and weight must both be int8 or float8_e4m3fn, got {x.dtype} and {weight.dtype}")
    for name, scale, of in (("x_scale", x_scale, x), ("weight_scale", weight_scale, weight)):
        if scale.dtype != torch.float32 or scale.dim() != 1 or scale.shape[0] != of.shape[0]:
            raise RuntimeError(
                f"gemm_q: {name} must be float32 [{of.shape[0]}], got {scale.dtype} {tuple(scale.shape)}"
            )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise RuntimeError(f"gemm_q: bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    if act not in ACTS:
        raise RuntimeError(f"gemm_q: act must be one of {', '.join(ACTS)}, got {act!r}")
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise RuntimeError(f"gemm_q: the result must be of a floating dtype of 16 bits or more, not {dtype}")
    if any(tensor is not None and tensor.device != x.device for tensor in (x_scale, weight, weight_scale, bias)):
        raise RuntimeError("gemm_q: all tensors must be on one device")


_gemm_q = declare(
    "gemm_q(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, str act, ScalarType dtype) "
    "-> Tensor",
    reference=gemm_q_reference,
    fake=gemm_q_fake,
)
torch.library.impl(f"{NAMESPACE}::gemm_q", "CUDA", gemm_q_cuda)
