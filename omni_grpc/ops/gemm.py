"""The gemm family: products of rows in 8 bits, which is what a quantised linear layer computes.

Shapes: T tokens, K input channels, N output channels. A code stands for code * scale, with one scale for each token and
one for each output channel (see ops.quant), so that both leave the sum:
    out[t, n] = act(x_scale[t] * weight_scale[n] * sum over k of x[t, k] * weight[n, k] + bias[n])
as W8A8 of https://arxiv.org/abs/2208.07339, section 2.1, has it for int8 and https://arxiv.org/abs/2209.05433 for e4m3.
Scales are applied to the sum, in float32, so nothing overflows on the way that did not overflow in the codes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.gemm_ways import AUTO, CODES, INVARIANT, TORCH, chosen, configurations, invariant, ways
from omni_grpc.ops.library import NAMESPACE, declare, directly
from omni_grpc.ops.quant import KERNEL_DTYPES, LARGEST, quantize_rows
from omni_grpc.ops.tuning import Call, Shape

ACTS = ("none", "gelu_tanh")
FP8_CAPABILITY = (8, 9)
"""The least compute capability with products of float8 (https://docs.nvidia.com/cuda/ada-tuning-guide)."""

ALIGNMENT, FEWEST_ROWS = 16, 32
"""What torch's products of 8 bits want on CUDA: features in multiples of 16, and for int8 more than 16 rows. Few rows
are a rare case of scales by row, so float8 gets as many.
"""

REFERENCE = "reference"
"""The way of what no configuration takes, where sums must be the same for any number of tokens."""

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
    config: str = AUTO,
) -> Tensor:
    """x [T, K] and weight [N, K] in one dtype, torch.int8 or torch.float8_e4m3fn -> [T, N] in `dtype`.

    x_scale: float32 [T]. weight_scale: float32 [N]. bias: [N] of any floating dtype. act: "none", or "gelu_tanh", GELU
    with the tanh approximation. Sums of int8 are exact. Those of float8 are exact in the reference; on CUDA they are
    what its tensor cores make of them, and their order may change with T. But for that, a token's result depends on no
    other token. A row whose scale is NaN is NaN.
    config: on CUDA, a way to compute it (see ops.gemm_ways); "auto" is the fastest that is known for the shape, and
    "invariant" the same for any T, so that a token's result never depends on how many there are.
    Any T, N and K, zero included. Raises RuntimeError where shapes, dtypes or devices disagree.
    """
    if x.is_cuda and directly(x):
        return gemm_q_cuda(x, x_scale, weight, weight_scale, bias, act, dtype, config)
    served = x.is_cuda or (x.dtype == torch.int8 and dtype in KERNEL_DTYPES and _plain(bias))
    call = _gemm_q if served else gemm_q_reference
    out: Tensor = call(x, x_scale, weight, weight_scale, bias, act, dtype, config)
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
    config: str = AUTO,
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
    config: str = AUTO,
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
    config: str = AUTO,
) -> Tensor:
    """By a configuration of the library, or by torch's own products (cuBLASLt, CUTLASS). Sizes that neither takes are
    padded with zeros, which add nothing.
    """
    fits = dtype == torch.bfloat16 and (bias is None or bias.dtype == dtype) and x.dtype in CODES
    if fits and config == AUTO and x.dim() == weight.dim() == 2:
        (tokens, inputs), channels = x.shape, weight.shape[0]
        if tokens and channels and inputs and not (inputs | channels) % ALIGNMENT:
            config = chosen(x.dtype, tokens, channels, inputs, bias is not None, act, x.device, candidates)
            if config != TORCH:
                # which checks its operands itself
                direct: Tensor = gemm_q_configured(x, x_scale, weight, weight_scale, bias, act, config)
                return direct
    _check(x, x_scale, weight, weight_scale, bias, act, dtype)
    tokens, channels, inputs = x.shape[0], weight.shape[0], x.shape[1]
    if not tokens or not channels or not inputs:
        return _finished(x_scale.new_zeros(tokens, channels), x_scale, weight_scale, bias, act, dtype)
    if config == INVARIANT:
        config = _invariant(x, channels, fits)
    if config in (AUTO, TORCH):
        return _by_torch(x, x_scale, weight, weight_scale, bias, act, dtype)
    if config == REFERENCE:
        return gemm_q_reference(x, x_scale, weight, weight_scale, bias, act, dtype)
    more = -channels % ALIGNMENT
    if more:
        weight_scale, bias = F.pad(weight_scale, (0, more)), None if bias is None else F.pad(bias, (0, more))
    operands = (_padded(x), x_scale, _padded(weight, rows=True), weight_scale)
    out: Tensor = gemm_q_configured(*operands, bias, act, config)
    return out[:, :channels].contiguous()


def _invariant(x: Tensor, channels: int, fits: bool) -> str:
    """The way for any number of tokens. Sums of int8 are exact, so that any way will do."""
    names = configurations(x.dtype, _capability(x)) if fits else ()
    return invariant(names, channels, x.shape[1]) or (TORCH if x.dtype == torch.int8 else REFERENCE)


def _capability(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device)


def _by_torch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    act: str,
    dtype: torch.dtype,
) -> Tensor:
    tokens, channels = x.shape[0], weight.shape[0]
    fewer = max(FEWEST_ROWS - tokens, 0)
    if fewer:
        x, x_scale = F.pad(x.view(torch.uint8), (0, 0, 0, fewer)).view(x.dtype), F.pad(x_scale, (0, fewer))
    x, weight = _padded(x), _padded(weight, rows=True)
    with torch.cuda.device(x.device):
        if x.dtype == torch.int8:
            sums = torch._int_mm(x, weight.t())[:, :channels]
            out = _finished(sums, x_scale, weight_scale, bias, act, dtype)
        elif _capability(x) < FP8_CAPABILITY:
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
    """Products of float8 with aligned features. Scales by row and column come with bfloat16 alone, bias included."""
    channels, more = weight_scale.shape[0], weight.shape[0] - weight_scale.shape[0]
    if dtype != torch.bfloat16 or (bias is not None and bias.dtype != dtype):
        one = torch.ones((), device=x.device)
        sums = torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)[:, :channels]
        return _finished(sums, x_scale, weight_scale, bias, act, dtype)
    if more:
        weight_scale, bias = F.pad(weight_scale, (0, more)), None if bias is None else F.pad(bias, (0, more))
    out = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale.contiguous()[:, None],
        scale_b=weight_scale.contiguous()[None],
        bias=None if bias is None else bias.contiguous(),
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


def gemm_q_configured_reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    act: str,
    config: str,
) -> Tensor:
    """What every configuration computes."""
    return gemm_q_reference(x, x_scale, weight, weight_scale, bias, act, torch.bfloat16)


def _gemm_q_configured_fake(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    act: str,
    config: str,
) -> Tensor:
    return gemm_q_fake(x, x_scale, weight, weight_scale, bias, act, torch.bfloat16)


BEYOND_L2, MOST_SETS = 128 << 20, 4
"""Bytes of operands that a measurement goes through, and how many sets of them it has at most."""


def candidates(shape: Shape, device: torch.device) -> dict[str, Call]:
    """A call for each way to compute a shape, see ops.tuning."""
    codes = torch.int8 if shape.kind[0] == "int8" else torch.float8_e4m3fn
    return gemm_calls(shape, device, sorted(ways(codes, device)))


def gemm_calls(shape: Shape, device: torch.device, names: Sequence[str]) -> dict[str, Call]:
    """Of normal data, whose bits cost the power that a model's do, in turns on as many operands as do not stay in the
    cache.
    """
    kind, epilogue, outputs, inputs = shape.kind
    assert isinstance(outputs, int)
    assert isinstance(inputs, int)
    assert isinstance(epilogue, str)
    codes = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    sets = []
    for _ in range(min(MOST_SETS, 1 + BEYOND_L2 // ((shape.size + outputs) * inputs))):
        x, weight = (torch.randn(rows, inputs, dtype=torch.bfloat16, device=device) for rows in (shape.size, outputs))
        bias = None if epilogue.startswith("plain") else x.new_ones(outputs)
        sets.append((*quantize_rows(x, codes), *quantize_rows(weight, codes), bias))
    act = epilogue.partition("+")[2] or "none"
    turns = itertools.cycle(sets)
    return {way: functools.partial(lambda way: _gemm_q(*next(turns), act, torch.bfloat16, way), way) for way in names}


gemm_q_configured = declare(
    "gemm_q_configured(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, str act, "
    "str config) -> Tensor",
    reference=gemm_q_configured_reference,
    fake=_gemm_q_configured_fake,
)
_gemm_q = declare(
    "gemm_q(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, str act, ScalarType dtype, "
    "str config='auto') -> Tensor",
    reference=gemm_q_reference,
    fake=gemm_q_fake,
)
torch.library.impl(f"{NAMESPACE}::gemm_q", "CUDA", gemm_q_cuda)
