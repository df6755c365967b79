"""The gemm family: 8-bit GEMMs, which is what a quantized linear layer computes.

Shapes: T tokens, K input channels, N output channels. A quantized value stands for value * scale, with one scale for
each token and one for each output channel (see ops.quant), so that both factor out of the sum:
    out[t, n] = act(x_scale[t] * weight_scale[n] * sum over k of x[t, k] * weight[n, k] + bias[n])
This is W8A8 of https://arxiv.org/abs/2208.07339, section 2.1, for int8 and of https://arxiv.org/abs/2209.05433 for
e4m3. Scales are applied to the sum in float32, so the result overflows only where it does not fit its own dtype.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.declare import KERNEL_DTYPES, op
from omni_grpc.ops.gemm_kernels import (
    AUTO,
    DTYPE_NAMES,
    INVARIANT,
    TORCH,
    candidate_kernels,
    chosen,
    configurations,
    invariant,
)
from omni_grpc.ops.quant import LARGEST, quantize_rows
from omni_grpc.ops.tuning import Call, Shape

ACTS = ("none", "gelu_tanh")
FP8_CAPABILITY = (8, 9)
"""The lowest compute capability with float8 tensor cores (https://docs.nvidia.com/cuda/ada-tuning-guide)."""

ALIGNMENT, FEWEST_ROWS = 16, 32
"""What torch's 8-bit GEMMs need on CUDA: features in multiples of 16, and for int8 more than 16 rows. Few rows are
rare, so float8 is padded to as many.
"""

REFERENCE = "reference"
"""The kernel for what no configuration takes, where sums must be the same for any number of tokens."""

EXACT_WEIGHTS = 1 << 20
"""Weights that the reference converts to float64 at a time: 8 MiB of them."""


class GemmOperands(NamedTuple):
    """The operands of `gemm_q`."""

    x: Tensor
    x_scale: Tensor
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    act: str
    dtype: torch.dtype


def _fake(*operands: Any) -> Tensor:
    given = GemmOperands(*operands[:7])
    _check(given)
    return given.x.new_empty(given.x.shape[0], given.weight.shape[0], dtype=given.dtype)


def _configured_fake(*operands: Any) -> Tensor:
    return _fake(*operands[:6], torch.bfloat16)


@op(fake=_configured_fake)
def gemm_q_configured(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, act: str, config: str
) -> Tensor:
    """`gemm_q`, x [T, K] -> bfloat16 [T, N], by one configuration of the library, which affects speed alone."""
    return _by_definition(GemmOperands(x, x_scale, weight, weight_scale, bias, act, torch.bfloat16))


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
    """`gemm_q` on CUDA, x [T, K] and weight [N, K] -> [T, N]: by a configuration of the library, or by torch's own
    GEMMs (cuBLASLt, CUTLASS). Sizes that neither takes are padded with zeros.
    """
    fits = dtype == torch.bfloat16 and (bias is None or bias.dtype == dtype) and x.dtype in DTYPE_NAMES
    if fits and config == AUTO and x.dim() == weight.dim() == 2:
        (tokens, inputs), channels = x.shape, weight.shape[0]
        if tokens and channels and inputs and not (inputs | channels) % ALIGNMENT:
            config = chosen(x.dtype, tokens, channels, inputs, bias is not None, act, x.device, candidates)
            if config != TORCH:
                # which checks its operands itself
                direct: Tensor = gemm_q_configured.overload(x, x_scale, weight, weight_scale, bias, act, config)
                return direct
    given = GemmOperands(x, x_scale, weight, weight_scale, bias, act, dtype)
    _check(given)
    tokens, channels, inputs = x.shape[0], weight.shape[0], x.shape[1]
    if not tokens or not channels or not inputs:
        return _epilogue(x_scale.new_zeros(tokens, channels), given)
    if config == INVARIANT:
        config = _invariant(x, channels, fits)
    if config in (AUTO, TORCH):
        return _by_torch(given)
    if config == REFERENCE:
        return _by_definition(given)
    more = -channels % ALIGNMENT
    if more:
        weight_scale, bias = F.pad(weight_scale, (0, more)), None if bias is None else F.pad(bias, (0, more))
    operands = (_padded(x), x_scale, _padded(weight, rows=True), weight_scale)
    out: Tensor = gemm_q_configured.overload(*operands, bias, act, config)
    return out[:, :channels].contiguous()


def _invariant(x: Tensor, channels: int, fits: bool) -> str:
    """The kernel whose bits do not depend on the number of tokens. Sums of int8 are exact, so any one does."""
    names = configurations(x.dtype, _capability(x)) if fits else ()
    return invariant(names, channels, x.shape[1]) or (TORCH if x.dtype == torch.int8 else REFERENCE)


def _capability(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device)


def _has_kernel(x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    plain = bias is None or bias.dtype in KERNEL_DTYPES
    return x.is_cuda or (x.dtype == torch.int8 and dtype in KERNEL_DTYPES and plain)


@op(kernel_if=_has_kernel, of=("x", "bias", "dtype"), fake=_fake, cuda=gemm_q_cuda)
def gemm_q(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    act: str = "none",
    dtype: torch.dtype = torch.bfloat16,
    config: str = AUTO,
) -> Tensor:
    """x [T, K] and weight [N, K] in one dtype, torch.int8 or torch.float8_e4m3fn -> [T, N] in `dtype`.

    x_scale: float32 [T]. weight_scale: float32 [N]. bias: [N] of any floating dtype. act: "none", or "gelu_tanh", GELU
    with the tanh approximation. Sums of int8 are exact. Those of float8 are exact in the reference; on CUDA they are
    what its tensor cores make of them, and their order may change with T. But for that, a token's result depends on no
    other token. A row whose scale is NaN is NaN.
    config: on CUDA, the kernel (see ops.gemm_kernels); "auto" is the fastest that is known for the shape, "invariant"
    the same for any T, so that a token's result never depends on how many there are.
    Any T, N and K, zero included. Raises RuntimeError where shapes, dtypes or devices disagree.
    """
    return _by_definition(GemmOperands(x, x_scale, weight, weight_scale, bias, act, dtype))


def _by_definition(given: GemmOperands) -> Tensor:
    """Sums of float8 are taken in float64, which holds all of them exactly: each product is a multiple of 2^-18 and at
    most 2^18, so 2^16 of them take 52 bits.
    """
    _check(given)
    x, weight = given.x, given.weight
    if x.dtype == torch.int8 and x.shape[1]:
        return _epilogue(_sums(x, weight), given)
    chunk = max(1, EXACT_WEIGHTS // max(1, x.shape[1]))
    wide = x.double()
    return _epilogue(torch.cat([wide @ part.double().t() for part in weight.split(chunk)], 1), given)


def _sums(x: Tensor, weight: Tensor) -> Tensor:
    """int8 [T, K], [N, K] -> int32 [T, N]. On a CPU torch's own leaves the sums of K = 1 unwritten, and judges a matrix
    by its strides, also where it is a single row or a repeated one: those are laid end to end first.
    """
    if x.shape[1] == 1:
        return x.int() * weight.int().t()
    x, weight = (matrix.reshape(-1).view(matrix.shape) for matrix in (x, weight))
    return torch._int_mm(x, weight.t())


def _by_torch(given: GemmOperands) -> Tensor:
    x, x_scale, weight, *_ = given
    tokens, channels = x.shape[0], weight.shape[0]
    fewer = max(FEWEST_ROWS - tokens, 0)
    if fewer:
        x, x_scale = F.pad(x.view(torch.uint8), (0, 0, 0, fewer)).view(x.dtype), F.pad(x_scale, (0, fewer))
    given = given._replace(x=_padded(x), x_scale=x_scale, weight=_padded(weight, rows=True))
    with torch.cuda.device(x.device):
        if x.dtype == torch.int8:
            out = _epilogue(torch._int_mm(given.x, given.weight.t())[:, :channels], given)
        elif _capability(x) < FP8_CAPABILITY:
            out = _by_definition(given._replace(weight=given.weight[:channels]))
        else:
            out = _scaled(given)
    return out[:tokens]


def _scaled(given: GemmOperands) -> Tensor:
    """A GEMM of float8 with aligned features. torch has scales by row and column for bfloat16 alone, bias included."""
    x, x_scale, weight, weight_scale, bias, act, dtype = given
    channels, more = weight_scale.shape[0], weight.shape[0] - weight_scale.shape[0]
    if dtype != torch.bfloat16 or (bias is not None and bias.dtype != dtype):
        one = torch.ones((), device=x.device)
        sums = torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)[:, :channels]
        return _epilogue(sums, given)
    if more:
        weight_scale, bias = F.pad(weight_scale, (0, more)), None if bias is None else F.pad(bias, (0, more))
    out = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=_aligned(x_scale)[:, None],
        scale_b=_aligned(weight_scale)[None],
        bias=None if bias is None else _aligned(bias),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )[:, :channels]
    return F.gelu(out, approximate="tanh").contiguous() if act == "gelu_tanh" else out.contiguous()


def _padded(x: Tensor, *, rows: bool = False) -> Tensor:
    """With zeros to the right, so that columns are a multiple of ALIGNMENT, and below, where rows are to be one too."""
    right, below = -x.shape[1] % ALIGNMENT, -x.shape[0] % ALIGNMENT if rows else 0
    if not right and not below:
        return _aligned(x)
    # as bytes: not every operator of torch takes float8, and a zero is a zero
    return F.pad(x.view(torch.uint8), (0, right, 0, below)).view(x.dtype)


def _aligned(x: Tensor) -> Tensor:
    """Its elements in a row, from an address that cuBLASLt takes: it refuses one within a word of an allocation."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def _epilogue(sums: Tensor, given: GemmOperands) -> Tensor:
    """The result from its sums [T, N]: scales, bias and activation in float32."""
    out = sums.float() * given.x_scale[:, None] * given.weight_scale
    if given.bias is not None:
        out = out + given.bias.float()
    if given.act == "gelu_tanh":
        out = F.gelu(out, approximate="tanh")
    return out.to(given.dtype).contiguous()


def _check(given: GemmOperands) -> None:
    """With plain raises, as in ops.quant."""
    x, x_scale, weight, weight_scale, bias, act, dtype = given
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


BEYOND_L2, MOST_SETS = 128 << 20, 4
"""Bytes of operands that a measurement cycles through, and the most sets of them."""


def candidates(shape: Shape, device: torch.device) -> dict[str, Call]:
    """A call for each candidate kernel of a shape, see ops.tuning."""
    operand_dtype = torch.int8 if shape.kind[0] == "int8" else torch.float8_e4m3fn
    return gemm_calls(shape, device, sorted(candidate_kernels(operand_dtype, device)))


def gemm_calls(shape: Shape, device: torch.device, names: Sequence[str]) -> dict[str, Call]:
    """Calls on normally distributed data, which draws the power that a model's does. They cycle through as many sets of
    operands as exceed the L2 cache.
    """
    kind, epilogue, outputs, inputs = shape.kind
    assert isinstance(outputs, int)
    assert isinstance(inputs, int)
    assert isinstance(epilogue, str)
    operand_dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    sets = []
    for _ in range(min(MOST_SETS, 1 + BEYOND_L2 // ((shape.size + outputs) * inputs))):
        x, weight = (torch.randn(rows, inputs, dtype=torch.bfloat16, device=device) for rows in (shape.size, outputs))
        bias = None if epilogue.startswith("plain") else x.new_ones(outputs)
        sets.append((*quantize_rows(x, operand_dtype), *quantize_rows(weight, operand_dtype), bias))
    act = epilogue.partition("+")[2] or "none"
    turns = itertools.cycle(sets)
    return {
        kernel: functools.partial(lambda kernel: gemm_q.overload(*next(turns), act, torch.bfloat16, kernel), kernel)
        for kernel in names
    }
