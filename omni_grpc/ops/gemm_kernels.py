"""The candidate kernels of `gemm_q` on CUDA, by name, and the choice of one for a shape.

A kernel is "torch" (a GEMM of cuBLASLt through torch, then the epilogue), or a configuration of the compiled library
such as "pingpong_128x128": the tile of the output and how warps share it. The order of tiles may follow, as in "/c4":
a wave of thread blocks goes along tokens (t), along channels (c) or as CUTLASS chooses (a), up to so many tiles wide.
With an "e" at the end, "/c4e", the kernel starts while the previous one ends (programmatic dependent launch).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch

from omni_grpc.ops.library import load_native
from omni_grpc.ops.tuning import Candidates, Shape, choices

TORCH, AUTO, INVARIANT = "torch", "auto", "invariant"
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({torch.float8_e4m3fn: "fp8", torch.int8: "int8"})

GENERATIONS: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = MappingProxyType(
    {"sm80": ((8, 0), (8, 9)), "sm89": ((8, 9), (8, 9)), "sm90": ((9, 0), (9, 0))}
)
"""The lowest and highest compute capability that a file of kernels is for, by the end of its name."""

ORDERS = ("/t1e", "/c1e", "/c2e")
"""The orders of tiles that are tried with every configuration."""

GENERAL = ("pingpong_128x128", "mma_128x128")
FOR_WIDENING = ("pingpong_128x192", *GENERAL)
FOR_FEW = ("pingpong_64x128", "mma_64x64")
"""Guesses, best first: for any shape, for layers with more outputs than inputs, and for up to FEW tokens."""

FEW = 256


@functools.cache
def configurations(operand_dtype: torch.dtype, capability: tuple[int, int], *, older: bool = False) -> tuple[str, ...]:
    """The library's configurations for GPUs of this capability. older: also those for earlier GPUs."""
    library = load_native()
    if not library.loaded:
        return ()
    listed = ctypes.CDLL(str(library.path)).omni_grpc_gemm_configs
    listed.restype = ctypes.c_char_p
    return parsed(listed().decode(), operand_dtype, capability, older=older)


def parsed(
    lines: str, operand_dtype: torch.dtype, capability: tuple[int, int], *, older: bool = False
) -> tuple[str, ...]:
    """From lines such as "sm90 fp8 pingpong_128x128"."""

    def fits(generation: str) -> bool:
        least, greatest = GENERATIONS[generation]
        return least <= capability and (older or capability <= greatest)

    entries = (line.split() for line in lines.splitlines())
    return tuple(name for generation, kind, name in entries if kind == DTYPE_NAMES[operand_dtype] and fits(generation))


@functools.cache
def candidate_kernels(operand_dtype: torch.dtype, device: torch.device) -> frozenset[str]:
    """All kernels of a device, for shapes that every one of them takes."""
    names = configurations(operand_dtype, torch.cuda.get_device_capability(device))
    return frozenset((TORCH, *(name + order for name in names for order in ORDERS)))


def shape_of(operand_dtype: torch.dtype, tokens: int, outputs: int, inputs: int, *, bias: bool, act: str) -> Shape:
    epilogue = "bias" if bias else "plain"
    return Shape(
        "gemm_q",
        (DTYPE_NAMES[operand_dtype], epilogue if act == "none" else f"{epilogue}+{act}", outputs, inputs),
        tokens,
    )


def chosen(
    operand_dtype: torch.dtype,
    tokens: int,
    outputs: int,
    inputs: int,
    bias: bool,
    act: str,
    device: torch.device,
    candidates: Candidates,
) -> str:
    """The kernel for a shape: by the measured times, or where there are none of a similar shape, by a rule. Memoized,
    since a step asks some hundred times.
    """
    table = choices(device)
    key = operand_dtype, tokens, outputs, inputs, bias, act
    kernel = table.memo.get(key)
    if kernel is None:
        names = configurations(operand_dtype, torch.cuda.get_device_capability(device))
        shape = shape_of(operand_dtype, tokens, outputs, inputs, bias=bias, act=act)
        known = table.of(shape, candidate_kernels(operand_dtype, device), candidates) if names else TORCH
        kernel = table.memo[key] = known or guess(shape, names)
        table.used.add((shape.op, kernel))
    return kernel


def guess(shape: Shape, names: tuple[str, ...]) -> str:
    """The kernel for a shape without times: the usual winner on a GPU that was measured."""
    if shape.size > FEW:
        return invariant(names, shape.kind[-2], shape.kind[-1]) or TORCH
    return next((f"{name}/c1e" for name in (*FOR_FEW, *GENERAL) if name in names), TORCH)


def has_invariant(operand_dtype: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel gives a token the same bits for any number of tokens, with results in this dtype."""
    names = configurations(operand_dtype, torch.cuda.get_device_capability(device))
    return dtype == torch.bfloat16 and invariant(names, 1, 1) is not None


def invariant(names: tuple[str, ...], outputs: int | str, inputs: int | str) -> str | None:
    """The configuration for any number of tokens: it adds up a row's sums in the same order whatever the other rows.
    None where the library has none for the device.
    """
    wanted, order = (FOR_WIDENING, "/t1e") if int(outputs) >= 2 * int(inputs) else (GENERAL, "/c1e")
    return next((name + order for name in wanted if name in names), None)
