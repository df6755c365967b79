"""What a kernel of the dequant family must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py.

Inputs are random and new in every run; a failure names the seed.
"""

from __future__ import annotations

import dataclasses
import itertools

import gguf
import numpy as np
import torch
from torch import Tensor

from omni_grpc.ops.dequant import CHUNK, PACKINGS, Packing, dequantize, dequantize_reference

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block has its float16 scales. All of its other bytes may be anything."""


@dataclasses.dataclass(frozen=True)
class Case:
    packing: str
    rows: int
    columns: int
    dtype: torch.dtype = F32

    def __str__(self) -> str:
        return f"{self.packing}-{self.rows}x{self.columns}-{str(self.dtype).removeprefix('torch.')}"


CASES = (
    *(Case(name, 3, 512, dtype) for name, dtype in itertools.product(PACKINGS, (F32, BF16, F16))),
    *(Case(name, 0, 256) for name in PACKINGS),
    *(Case(name, 1, PACKINGS[name].elements) for name in PACKINGS),
    # more than the reference unpacks at a time
    *(Case(name, 3, CHUNK["cpu"] // 2 + 256) for name in PACKINGS),
)


def random_blocks(packing: Packing, count: int, seed: int) -> np.ndarray:
    """uint8 [count, size]: any codes, with scales that are numbers, some of them tiny and some zero."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (count, packing.size), dtype=np.uint8)
    if packing.name not in SCALES:
        values = generator.standard_normal(count).astype(np.float32)
        made = gguf.quants.quantize(values.reshape(-1, 1), gguf.GGMLQuantizationType[packing.name])
        return made.view(np.uint8).reshape(count, packing.size)
    for at in SCALES[packing.name]:
        scales = generator.standard_normal(count) * 10.0 ** generator.integers(-7, 1, count)
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(count, 2)
    return blocks


def expected(blocks: np.ndarray, name: str) -> Tensor:
    """What the package `gguf` makes of blocks, in float32."""
    kind = gguf.GGMLQuantizationType[name]
    data = {"F32": np.float32, "F16": np.float16}.get(name)
    return torch.from_numpy(gguf.quants.dequantize(blocks if data is None else blocks.view(data), kind).copy())


def check_case(case: Case, device: str, seed: int) -> None:
    packing = PACKINGS[case.packing]
    blocks = random_blocks(packing, case.rows * case.columns // packing.elements, seed)
    wanted = expected(blocks, case.packing).reshape(case.rows, case.columns) if len(blocks) else torch.empty(0, 256)
    packed = torch.from_numpy(blocks.reshape(-1)).to(device)
    for call in (dequantize, lambda packed, packing, out: dequantize_reference(packed, packing.number, out)):
        out = torch.full((case.rows, case.columns), torch.nan, dtype=case.dtype, device=device)
        call(packed, packing, out)
        assert torch.equal(out.cpu(), wanted.to(case.dtype)), f"{case} differs from gguf, seed {seed}"


CUDA_CHECKS: tuple[object, ...] = ()
