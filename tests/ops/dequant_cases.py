"""What a kernel of the dequant family must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py.

Inputs are random and new in every run; a failure names the seed. The oracle is the reference on the CPU, which
test_dequant.py compares with the package `gguf`: that need not be where a GPU is.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import torch

from omni_grpc.ops.dequant import CHUNK, PACKINGS, Packing, dequantize, dequantize_op

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where a block has its float16 scales. All of its other bytes may be anything."""


WHOLE = {"F32": F32, "F16": F16, "BF16": BF16}


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
        values = torch.from_numpy(generator.standard_normal((count, 1)))
        return values.to(WHOLE[packing.name]).view(-1).view(torch.uint8).view(count, packing.size).numpy()
    for at in SCALES[packing.name]:
        scales = generator.standard_normal(count) * 10.0 ** generator.integers(-7, 1, count)
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(count, 2)
    return blocks


def check_case(case: Case, device: str, seed: int) -> None:
    packing = PACKINGS[case.packing]
    blocks = random_blocks(packing, case.rows * case.columns // packing.elements, seed)
    packed, wanted = torch.from_numpy(blocks.reshape(-1)), torch.empty(case.rows, case.columns)
    dequantize_op.reference(packed, packing.number, wanted)
    out = torch.full((case.rows, case.columns), torch.nan, dtype=case.dtype, device=device)
    dequantize(packed.to(device), packing, out)
    assert torch.equal(out.cpu(), wanted.to(case.dtype)), f"{case} differs from the reference, seed {seed}"


CHECKS: tuple[object, ...] = ()
CUDA_CHECKS: tuple[object, ...] = ()
