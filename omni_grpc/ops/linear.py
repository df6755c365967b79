"""A linear layer in full precision, by the faster of the GEMM libraries in torch."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.quant import gelu_tanh

LEAST_PRODUCTS = 2_000_000
"""Multiplications from which oneDNN's call, which costs 8 us more, pays off."""
CPU_INFO = Path("/proc/cpuinfo")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b: x [T, K], weight [N, K], bias [N] -> [T, N].

    torch computes float32 GEMMs with MKL, which uses AVX-512 on Intel's processors alone. On others that have it,
    oneDNN, which torch has too, takes half the time.
    """
    if _uses_onednn(x, weight):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def linear_gelu_tanh(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """gelu_tanh(x W^T + b), see ops.quant: x [T, K], weight [N, K], bias [N] -> [T, N].

    In bfloat16 on CUDA, GELU is part of the GEMM's epilogue, before anything is rounded: cuBLASLt's
    CUBLASLT_EPILOGUE_GELU_BIAS, which is this approximation.
    """
    if bias is not None and _has_epilogue(x, weight, bias):
        out: Tensor = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
        return out
    return gelu_tanh(linear(x, weight, bias))


def _has_epilogue(*operands: Tensor) -> bool:
    return (
        all(each.is_cuda and each.dtype == torch.bfloat16 for each in operands)
        and operands[0].dim() == 2
        and not torch.is_grad_enabled()
    )


def _uses_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32 == weight.dtype
        and not torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and x.dim() == 2
        and x.shape[0] * weight.numel() >= LEAST_PRODUCTS
        and x.is_contiguous()
        and weight.is_contiguous()
        and mkl_is_narrow()
    )


@functools.cache
def mkl_is_narrow() -> bool:
    """Whether the processor has wider vectors than MKL uses on it, and torch has oneDNN."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not CPU_INFO.is_file():
        return False
    has = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return bool(has) and "GenuineIntel" not in CPU_INFO.read_text()
