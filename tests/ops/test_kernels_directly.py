"""The CPU kernels that read or write 8 bits, called past the function that chooses between kernel and reference: any
size, zero and one included, and matrices whose rows do not lie end to end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from omni_grpc import ops
from omni_grpc.ops import gemm, norm, quant
from omni_grpc.ops.dequant import KERNEL_TYPES, PACKINGS, dequantize_op
from tests.ops.dequant_cases import random_blocks
from tests.ops.quant_cases import check_codes

pytestmark = pytest.mark.skipif(not ops.load_native().loaded, reason="there is no op library here")

F32, BF16, I8, F8 = torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn
SIZES = (0, 1, 2, 3, 15, 17, 33)
WIDTHS = (*SIZES, 127, 129)

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "columns": lambda x: x.t().contiguous().t(),
    "every second column": lambda x: torch.stack([x, torch.full_like(x, 9)], 2)[:, :, 0],
    "inside of wider rows": lambda x: torch.cat([torch.full_like(x[:, :1], 9), x, x[:, :1]], 1)[:, 1 : 1 + x.shape[1]],
    # of which a single one too has a stride of 0
    "one row repeated": lambda x: x[:1].expand(len(x) + 2, -1)[: len(x)] if len(x) else x,
    "one column repeated": lambda x: x[:, :1].expand(x.shape) if x.shape[1] else x,
    "odd strides of one": lambda x: x.as_strided(
        x.shape, [5 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    ),
}


def leave_behind(elements: int, dtype: torch.dtype) -> None:
    """What the allocator hands out next holds a number that no result has."""
    held = [torch.full((max(1, elements),), 113, dtype=dtype) for _ in range(4)]
    del held


@pytest.mark.parametrize("function", [gemm.gemm_q, gemm.gemm_q.overload, gemm.gemm_q.reference])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_of_int8_is_exact(function: Callable[..., Tensor], layout: str, seed: int) -> None:
    """Against the product of integers; torch's own leaves one channel unwritten and misreads rows that are repeated."""
    generator = torch.Generator().manual_seed(seed)
    of = LAYOUTS[layout]
    for tokens, channels, width in itertools.product((0, 1, 2, 17), (0, 1, 2, 17), WIDTHS):
        x = torch.randint(-128, 128, (tokens, width), generator=generator, dtype=I8)
        weight = torch.randint(-128, 128, (channels, width), generator=generator, dtype=I8)
        for left, right in ((of(x), weight), (x, of(weight)), (of(x), of(weight))):
            leave_behind(tokens * channels, torch.int32)
            out = function(left, torch.ones(tokens), right, torch.ones(channels), None, "none", F32)
            expected = left.int() @ right.int().t()
            assert torch.equal(out, expected.float()), f"{tokens}x{channels}x{width}, seed {seed}"


@pytest.mark.parametrize("function", [gemm.gemm_q.overload, gemm.gemm_q.reference])
def test_what_follows_a_product_is_right_at_any_width(function: Callable[..., Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tokens, channels, width in itertools.product((1, 3), WIDTHS, (0, 1, 17)):
        x, weight = (torch.randint(-9, 10, (rows, width), generator=generator, dtype=I8) for rows in (tokens, channels))
        scales = [torch.rand(rows, generator=generator) * 0.1 for rows in (tokens, channels)]
        for bias, act, dtype in itertools.product((None, F32, BF16), gemm.ACTS, (F32, BF16)):
            added = None if bias is None else torch.randn(channels, generator=generator).to(bias)
            leave_behind(tokens * channels, dtype)
            out = function(x, scales[0], weight, scales[1], added, act, dtype)
            exact = (x.double() @ weight.double().t()) * scales[0].double()[:, None] * scales[1].double()
            exact = exact if added is None else exact + added.double()
            exact = torch.nn.functional.gelu(exact, approximate="tanh") if act == "gelu_tanh" else exact
            close = {F32: 2e-6, BF16: 2.0**-8}[dtype]
            torch.testing.assert_close(out.double(), exact, rtol=close, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_become_8_bits_at_any_width(layout: str, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    of, code = LAYOUTS[layout], quant.quantize_rows_op.overload
    for tokens, width, int8 in itertools.product((0, 1, 2, 5), WIDTHS, (True, False)):
        x, up = (of(torch.randn(tokens, width, generator=generator).to(dtype)) for _ in range(2))
        where, kind = f"{tokens}x{width}, seed {seed}", I8 if int8 else F8
        made, defined = code(x, None, int8), quant.quantize_rows_op.reference(x, None, int8)
        assert torch.equal(made[0].view(torch.uint8), defined[0].view(torch.uint8)), where
        assert torch.equal(made[1], defined[1]), where
        gelu = torch.nn.functional.gelu(x.double(), approximate="tanh")
        check_codes(where, *quant.gelu_tanh_quantize_rows.overload(x, int8), gelu, kind)
        silu = torch.nn.functional.silu(x.double()) * up.double()
        check_codes(where, *quant.silu_mul_quantize_rows.overload(x, up, int8), silu, kind)
        beside = torch.cat([up.double(), gelu], 1)
        check_codes(where, *quant.concat_gelu_tanh_quantize_rows.overload(up, x, int8), beside, kind)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_normed_rows_become_8_bits_at_any_width(layout: str, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    of = LAYOUTS[layout]
    for tokens, width, int8 in itertools.product((0, 1, 2, 5), WIDTHS, (True, False)):
        x, y, scale, shift = (of(torch.randn(tokens, width, generator=generator).to(dtype)) for _ in range(4))
        index = torch.arange(tokens, dtype=torch.int32).flip(0)
        where, kind = f"{tokens}x{width}, seed {seed}", I8 if int8 else F8
        operands = (x, y, None, scale, shift, index)
        rms = (1e-2, None, None, True, 1.0)
        wide = tuple(None if each is None else each.double() for each in operands[:5])
        total, codes, scales = norm.gate_add_norm_modulate_quantize.overload(*operands, *rms, None, int8)
        assert torch.equal(total, norm.gate_add.reference(x, y, None, index)), where
        normed = norm.norm_modulate.reference(total.double(), *wide[3:], index, *rms)
        check_codes(where, codes, scales, normed, kind)
        exact = norm.norm_modulate.reference(wide[0], *wide[3:], index, *rms)
        check_codes(where, *norm.norm_modulate_quantize.overload(x, scale, shift, index, *rms, int8), exact, kind)


@pytest.mark.parametrize("name", sorted(KERNEL_TYPES))
def test_few_blocks_are_unpacked_from_any_byte_on(name: str, seed: int) -> None:
    packing = PACKINGS[name]
    for count, first, dtype in itertools.product((0, 1, 2, 3, 9), (0, 1, 3), (F32, BF16)):
        blocks = torch.from_numpy(random_blocks(packing, count, seed).reshape(-1))
        packed = torch.cat([torch.zeros(first, dtype=torch.uint8), blocks])[first:]
        made = torch.full((count * packing.elements + 2,), 113, dtype=dtype)
        wanted = torch.empty(count * packing.elements, dtype=F32)
        dequantize_op.reference(blocks, packing.number, wanted)
        dequantize_op.overload(packed, packing.number, made[1:-1])
        assert torch.equal(made[1:-1], wanted.to(dtype)), f"{count} blocks from byte {first}, seed {seed}"
        assert (made[0], made[-1]) == (113, 113), f"{count} blocks from byte {first}, seed {seed}"
