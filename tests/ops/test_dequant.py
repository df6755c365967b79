"""The dequant family: what this process dispatches to and its reference, against the package `gguf`.

That is imported where it is needed: a machine with a GPU runs the other tests without it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omni_grpc.ops.dequant import KERNEL_TYPES, PACKINGS, Packing, dequantize, dequantize_op
from tests.ops.dequant_cases import random_blocks


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=lambda packing: packing.name)
def test_it_is_what_gguf_computes_to_the_bit(packing: Packing, seed: int) -> None:
    import gguf

    blocks = random_blocks(packing, 4096, seed)
    as_read = {"F32": np.float32, "F16": np.float16}.get(packing.name, np.uint8)
    kind = gguf.GGMLQuantizationType[packing.name]
    wanted = torch.from_numpy(np.array(gguf.quants.dequantize(blocks.view(as_read), kind)))
    packed, out = torch.from_numpy(blocks.reshape(-1)), torch.empty(wanted.shape)
    dequantize(packed, packing, out)
    assert torch.equal(out, wanted), f"seed {seed}"
    dequantize_op.reference(packed, packing.number, out.zero_())
    assert torch.equal(out, wanted), f"seed {seed}"


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=lambda packing: packing.name)
def test_blocks_are_as_large_as_ggml_says(packing: Packing) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType[packing.name]
    assert (packing.number, (packing.elements, packing.size)) == (kind.value, gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize(
    ("name", "step"), [("Q8_0", 1 / 127), ("Q4_0", 1 / 7), ("Q4_1", 1 / 7), ("Q5_0", 1 / 15), ("Q5_1", 1 / 15)]
)
def test_a_weight_comes_back_from_what_gguf_packs(name: str, step: float, seed: int) -> None:
    import gguf

    weight = np.random.default_rng(seed).standard_normal((8, 96)).astype(np.float32)
    packed = torch.from_numpy(gguf.quants.quantize(weight, gguf.GGMLQuantizationType[name]))
    out = torch.empty(8, 96)
    dequantize(packed.reshape(-1), PACKINGS[name], out)
    largest = np.abs(weight).reshape(8, 3, 32).max(2).repeat(32, 1)
    assert (np.abs(out.numpy() - weight) <= step * largest + 1e-3).all(), f"seed {seed}"


@pytest.mark.parametrize("name", PACKINGS)
def test_opcheck(name: str, seed: int) -> None:
    packing = PACKINGS[name]
    packed = torch.from_numpy(random_blocks(packing, 8, seed).reshape(-1))
    if packing.name not in KERNEL_TYPES:
        return  # the reference alone serves it
    for dtype in (torch.float32, torch.bfloat16):
        arguments = (packed, packing.number, torch.zeros(2, 4 * packing.elements, dtype=dtype))
        torch.library.opcheck(torch.ops.omni_grpc.dequantize.default, arguments)


def test_what_does_not_fit_is_refused_in_words() -> None:
    q8, packed, out = PACKINGS["Q8_0"], torch.zeros(68, dtype=torch.uint8), torch.empty(2, 32)
    with pytest.raises(RuntimeError, match="68 bytes of Q8_0 are not 32 elements"):
        dequantize(packed, q8, out[:1])
    with pytest.raises(RuntimeError, match="packed must be uint8"):
        dequantize(packed.float(), q8, out)
    with pytest.raises(RuntimeError, match="packed must be uint8"):
        dequantize(packed.view(2, 34), q8, out)
    with pytest.raises(RuntimeError, match="out must be contiguous"):
        dequantize(packed, q8, torch.empty(32, 2).t())
    with pytest.raises(RuntimeError, match="out must be contiguous and of a floating dtype"):
        dequantize(packed, q8, out.int())
    with pytest.raises(RuntimeError, match="ggml's type 10 is not served"):
        torch.ops.omni_grpc.dequantize(packed, 10, out)
    with pytest.raises(ValueError, match="33 elements are not a whole number of Q8_0 blocks, 32 each"):
        q8.bytes_of(33)
