"""The ways to compute `gemm_q` on CUDA, by name, and which of them a shape gets.

A way is "torch" (cuBLASLt's products by torch, and what follows them), or a configuration of the compiled library such
as "pingpong_128x128": a tile of the output and how warps share the work on it. "/c4" after it is the order of tiles: a
wave goes along tokens (t), along channels (c) or as CUTLASS sees fit (a), and is up to so many tiles wide. With an "e"
behind it, "/c4e", the kernel is launched while the one before it ends.
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
CODES: Mapping[torch.dtype, str] = MappingProxyType({torch.float8_e4m3fn: "fp8", torch.int8: "int8"})

GENERATIONS: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = MappingProxyType(
    {"sm80": ((8, 0), (8, 9)), "sm89": ((8, 9), (8, 9)), "sm90": ((9, 0), (9, 0))}
)
"""The least and the greatest compute capability that a file of kernels is for, by the end of its name."""

ORDERS = ("/t1e", "/c1e", "/c2e")
"""That are tried of every configuration."""

GENERAL = ("pingpong_128x128", "mma_128x128")
FOR_WIDENING = ("pingpong_128x192", *GENERAL)
FOR_FEW = ("pingpong_64x128", "mma_64x64")
"""The better guess for any shape, for layers with more outputs than inputs, and for up to FEW tokens."""

FEW = 256


@functools.cache
def configurations(codes: torch.dtype, capability: tuple[int, int], *, older: bool = False) -> tuple[str, ...]:
    """Those of the library that are for GPUs of this capability. older: and those for GPUs before it."""
    library = load_native()
    if not library.loaded:
        return ()
    listed = ctypes.CDLL(str(library.path)).omni_grpc_gemm_configs
    listed.restype = ctypes.c_char_p
    return parsed(listed().decode(), codes, capability, older=older)


def parsed(lines: str, codes: torch.dtype, capability: tuple[int, int], *, older: bool = False) -> tuple[str, ...]:
    """From lines such as "sm90 fp8 pingpong_128x128"."""

    def fits(generation: str) -> bool:
        least, greatest = GENERATIONS[generation]
        return least <= capability and (older or capability <= greatest)

    entries = (line.split() for line in lines.splitlines())
    return tuple(name for generation, kind, name in entries if kind == CODES[codes] and fits(generation))


@functools.cache
def ways(codes: torch.dtype, device: torch.device) -> frozenset[str]:
    """All that a device has for shapes that every one of them takes."""
    names = configurations(codes, torch.cuda.get_device_capability(device))
    return frozenset((TORCH, *(name + order for name in names for order in ORDERS)))


def shape_of(codes: torch.dtype, tokens: int, outputs: int, inputs: int, *, bias: bool, act: str) -> Shape:
    epilogue = "bias" if bias else "plain"
    return Shape("gemm_q", (CODES[codes], epilogue if act == "none" else f"{epilogue}+{act}", outputs, inputs), tokens)


def chosen(
    codes: torch.dtype,
    tokens: int,
    outputs: int,
    inputs: int,
    bias: bool,
    act: str,
    device: torch.device,
    candidates: Candidates,
) -> str:
    """By the table; where that has nothing of this shape or near it, by a rule. A step asks some hundred times."""
    table = choices(device)
    key = codes, tokens, outputs, inputs, bias, act
    way = table.memo.get(key)
    if way is None:
        names = configurations(codes, torch.cuda.get_device_capability(device))
        shape = shape_of(codes, tokens, outputs, inputs, bias=bias, act=act)
        known = table.of(shape, ways(codes, device), candidates) if names else TORCH
        way = table.memo[key] = known or guess(shape, names)
    return way


def guess(shape: Shape, names: tuple[str, ...]) -> str:
    """The way of a shape that nothing is known of: what mostly wins on a card that was measured."""
    if shape.size > FEW:
        return invariant(names, shape.kind[-2], shape.kind[-1]) or TORCH
    return next((f"{name}/c1e" for name in (*FOR_FEW, *GENERAL) if name in names), TORCH)


def has_invariant(codes: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether results in this dtype can be the same for any number of tokens, at the speed of a kernel."""
    names = configurations(codes, torch.cuda.get_device_capability(device))
    return dtype == torch.bfloat16 and invariant(names, 1, 1) is not None


def invariant(names: tuple[str, ...], outputs: int | str, inputs: int | str) -> str | None:
    """The configuration for any number of tokens: a row's sums are added up in the same order whatever is beside it.
    None where the library has no such one for the device.
    """
    wanted, order = (FOR_WIDENING, "/t1e") if int(outputs) >= 2 * int(inputs) else (GENERAL, "/c1e")
    return next((name + order for name in wanted if name in names), None)
