"""The dequant family: dequantization of the packed weights of GGUF files.

A packed weight is a run of blocks. A block is some bytes that stand for so many neighbouring elements of a row: their
codes, of 4 to 8 bits, and the scales that they are multiplied with. What the bytes mean is fixed by ggml
(https://github.com/ggml-org/ggml, src/ggml-common.h and ggml-quants.c); the numbers here are those that its Python
package `gguf` computes, to the last bit of float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from omni_grpc.ops.declare import KERNEL_DTYPES, op

KERNEL_DEVICES = frozenset({"cpu", "cuda"})
KERNEL_TYPES = frozenset({"Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
"""The types that models use. Others occur where a row is not a multiple of 256."""
CHUNK: Mapping[str, int] = MappingProxyType({"cpu": 1 << 18, "cuda": 1 << 24})
"""Elements that the reference unpacks at a time: few enough to stay in a CPU's cache, and to be no memory on a GPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """A type of GGUF files: `elements` of a row are `size` bytes. `number` is ggml's own for it."""

    name: str
    number: int
    elements: int
    size: int

    def bytes_of(self, elements: int) -> int:
        """Raises ValueError where that is no whole number of blocks."""
        if elements % self.elements:
            raise ValueError(f"{elements} elements are not a whole number of {self.name} blocks, {self.elements} each")
        return elements // self.elements * self.size


PACKINGS: Mapping[str, Packing] = MappingProxyType(
    {
        packing.name: packing
        for packing in (
            Packing("F32", 0, 1, 4),
            Packing("F16", 1, 1, 2),
            Packing("Q4_0", 2, 32, 18),
            Packing("Q4_1", 3, 32, 20),
            Packing("Q5_0", 6, 32, 22),
            Packing("Q5_1", 7, 32, 24),
            Packing("Q8_0", 8, 32, 34),
            Packing("Q4_K", 12, 256, 144),
            Packing("Q5_K", 13, 256, 176),
            Packing("Q6_K", 14, 256, 210),
            Packing("BF16", 30, 1, 2),
        )
    }
)
"""By the names that ggml gives them."""


def dequantize(packed: Tensor, packing: Packing, out: Tensor) -> None:
    """Fills `out`, contiguous and of any shape, with what packed, uint8 [bytes] of as many elements in order, stands
    for: computed in float32, and rounded to the dtype of `out`.

    Raises RuntimeError where shapes, dtypes or devices do not fit each other. Kernels on the CPU and on CUDA serve most
    types of blocks to float32 and bfloat16, the reference everything else.
    """
    served = packing.name in KERNEL_TYPES and out.dtype in KERNEL_DTYPES and out.device.type in KERNEL_DEVICES
    (dequantize_op.overload if served else dequantize_op.reference)(packed, packing.number, out)


# --- the definition ---------------------------------------------------------------------------------------------------


def _fake(packed: Tensor, number: int, out: Tensor) -> None:
    _check(packed, number, out)


@op(fake=_fake, mutates=("out",))
def dequantize_op(packed: Tensor, number: int, out: Tensor) -> None:
    """`dequantize` of packed uint8 [bytes] into `out` [...], of any shape. `number`: ggml's number of the packing."""
    packing = _check(packed, number, out)
    flat, unpack = out.view(-1), UNPACK[packing.name]
    step = CHUNK.get(out.device.type, CHUNK["cpu"]) // packing.elements
    blocks = packed.view(-1, packing.size)
    for first in range(0, len(blocks), step):
        some = unpack(blocks[first : first + step])
        flat[first * packing.elements : first * packing.elements + some.numel()].copy_(some.reshape(-1))


def _halves(blocks: Tensor, at: int = 0) -> Tensor:
    """The float16 at a byte of each block, in float32: [n, 1]."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _split(codes: Tensor, *shifts: int, mask: int) -> Tensor:
    """[n, groups, width] -> [n, groups, shifts, width]: what is at these bits of each byte."""
    return torch.stack([(codes >> shift) & mask for shift in shifts], 2)


def _q4_0(blocks: Tensor) -> Tensor:
    codes = _split(blocks[:, 2:].unsqueeze(1), 0, 4, mask=15).flatten(1)
    return _halves(blocks) * (codes.float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    codes = _split(blocks[:, 4:].unsqueeze(1), 0, 4, mask=15).flatten(1)
    return _halves(blocks) * codes.float() + _halves(blocks, 2)


def _five_bits(blocks: Tensor, at: int) -> Tensor:
    """32 codes, of which the fifth bits come first, one after the other: float32 [n, 32]."""
    high = _split(blocks[:, at : at + 4].unsqueeze(2), *range(8), mask=1).flatten(1)
    low = _split(blocks[:, at + 4 :].unsqueeze(1), 0, 4, mask=15).flatten(1)
    return (low | (high << 4)).float()


def _q5_0(blocks: Tensor) -> Tensor:
    return _halves(blocks) * (_five_bits(blocks, 2) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _halves(blocks) * _five_bits(blocks, 4) + _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _halves(blocks)


def _scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the eight parts of a block, 6 bits each, of which the last four have theirs in two places:
    float32 [n, 8, 1].
    """
    low, high, rest = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat([low & 63, (rest & 15) | ((low >> 2) & 48)], 1)
    minima = torch.cat([high & 63, (rest >> 4) | ((high >> 2) & 48)], 1)
    return (_halves(blocks) * scales.float()).unsqueeze(2), (_halves(blocks, 2) * minima.float()).unsqueeze(2)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales(blocks)
    codes = _split(blocks[:, 16:].unflatten(1, (4, 32)), 0, 4, mask=15).flatten(1, 2)
    return scales * codes.float() - minima


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales(blocks)
    low = _split(blocks[:, 48:].unflatten(1, (4, 32)), 0, 4, mask=15).flatten(1, 2)
    high = _split(blocks[:, 16:48].unsqueeze(1), *range(8), mask=1).flatten(1, 2)
    return scales * (low | (high << 4)).float() - minima


def _q6_k(blocks: Tensor) -> Tensor:
    low = _split(blocks[:, :128].unflatten(1, (2, 64)), 0, 4, mask=15).flatten(1)
    high = _split(blocks[:, 128:192].unflatten(1, (2, 32)), 0, 2, 4, 6, mask=3).flatten(1)
    scales = _halves(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    codes = (low | (high << 4)).float() - 32
    out: Tensor = scales.unsqueeze(2) * codes.unflatten(1, (16, 16))
    return out


UNPACK: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "F32": lambda blocks: blocks.view(torch.float32),
        "F16": lambda blocks: blocks.view(torch.float16).float(),
        "BF16": lambda blocks: blocks.view(torch.bfloat16).float(),
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
"""uint8 [n, size of a block] -> float32 with n times its elements, in order."""


def _check(packed: Tensor, number: int, out: Tensor) -> Packing:
    packing = next((packing for packing in PACKINGS.values() if packing.number == number), None)
    if packing is None:
        raise RuntimeError(f"dequantize: ggml's type {number} is not supported")
    if packed.dim() != 1 or packed.dtype != torch.uint8 or not packed.is_contiguous():
        raise RuntimeError("dequantize: packed must be uint8 [bytes], contiguous")
    if not out.is_contiguous() or not out.is_floating_point():
        raise RuntimeError("dequantize: out must be contiguous and of a floating dtype")
    if out.device != packed.device:
        raise RuntimeError("dequantize: packed and out must be on one device")
    if out.numel() % packing.elements or packed.numel() != packing.bytes_of(out.numel()):
        raise RuntimeError(f"dequantize: {packed.numel()} bytes of {packing.name} are not {out.numel()} elements")
    return packing
