"""What a kernel of the gemm family must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py.

Inputs are random and new in every run; a failure names the seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from omni_grpc.ops import gemm, quant
from omni_grpc.ops.gemm_kernels import candidate_kernels, configurations
from tests.ops.quant_cases import poison

F32, BF16, F8, I8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int
    inputs: int
    outputs: int
    codes: torch.dtype
    dtype: torch.dtype = BF16
    bias: torch.dtype | None = BF16
    act: str = "none"
    strided: bool = False
    """Scales that are every second element of something, and a bias that begins in the middle of a word."""

    def __str__(self) -> str:
        shape = f"{self.tokens}x{self.outputs}x{self.inputs}"
        kinds = "-".join(str(kind).removeprefix("torch.") for kind in (self.codes, self.dtype, self.bias))
        return f"{shape}-{kinds}-{self.act}" + ("-strided" if self.strided else "")


def _cases() -> Iterator[Case]:
    for codes, dtype, bias, act in itertools.product((I8, F8), (F32, BF16), (None, F32, BF16), gemm.ACTS):
        yield Case(40, 64, 48, codes, dtype, bias, act)
    for codes, tokens in itertools.product((I8, F8), (0, 1, 2, 15, 16, 17, 31, 33, 128)):
        yield Case(tokens, 96, 80, codes)
    # what no tensor core takes as it is
    for codes, (inputs, outputs) in itertools.product((I8, F8), ((1, 1), (7, 5), (72, 66), (100, 8), (8, 24), (33, 1))):
        yield Case(19, inputs, outputs, codes, F32)
        yield Case(3, inputs, outputs, codes, BF16, F32, "gelu_tanh", strided=True)
    for codes in (I8, F8):
        yield Case(5, 0, 16, codes)
        yield Case(5, 16, 0, codes)
        yield Case(21, 12288, 40, codes, F32)
        yield Case(18, 100, 66, codes, strided=True)
        yield Case(50, 96, 80, codes, strided=True)


CASES = tuple(_cases())


@dataclasses.dataclass(frozen=True)
class Inputs:
    x: Tensor
    x_scale: Tensor
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    @property
    def operands(self) -> tuple[Any, ...]:
        return (self.x, self.x_scale, self.weight, self.weight_scale, self.bias)


def inputs_of(case: Case, device: str, seed: int) -> Inputs:
    """Rows and channels of very unlike size, quantised as a layer does it."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def spread(tensor: Tensor) -> Tensor:
        if not case.strided:
            return tensor.to(device)
        return torch.stack([tensor, torch.full_like(tensor, 1e9)], 1).to(device)[:, 0]

    x = draw(case.tokens, case.inputs) * torch.logspace(-2, 2, case.tokens)[:, None]
    weight = draw(case.outputs, case.inputs) * torch.logspace(-2, 0, case.outputs)[:, None]
    codes, scale = quant.quantize_rows(x, case.codes)
    weight_codes, weight_scale = quant.quantize_rows(weight, case.codes)
    bias = None if case.bias is None else draw(case.outputs + 1).to(case.bias).to(device)[1:]
    bias = bias if bias is None or case.strided else bias.clone()
    return Inputs(codes.to(device), spread(scale), weight_codes.to(device), spread(weight_scale), bias)


def exact(case: Case, given: Inputs) -> Tensor:
    """The definition in float64, on the CPU."""
    x, x_scale, weight, weight_scale, bias = (None if t is None else t.cpu().double() for t in given.operands)
    assert x is not None
    assert weight is not None
    assert x_scale is not None
    out = x @ weight.T * x_scale[:, None] * weight_scale
    out = out if bias is None else out + bias
    return torch.nn.functional.gelu(out, approximate="tanh") if case.act == "gelu_tanh" else out


def check_case(case: Case, device: str, seed: int, config: str = "auto") -> None:
    given = inputs_of(case, device, seed)
    poison(torch.empty(case.tokens, case.outputs, dtype=case.dtype, device=device))
    out = gemm.gemm_q(*given.operands, act=case.act, dtype=case.dtype, config=config)
    what, expected = f"gemm_q {case} by {config} on {device}, seed {seed}", exact(case, given)
    assert out.shape == expected.shape, f"{what}: shape {out.shape}"
    assert out.dtype == case.dtype, f"{what}: {out.dtype}"
    assert out.is_contiguous(), f"{what}: strides {out.stride()}"
    # tensor cores add products of float8 with fewer bits than float32 has: measured against what was added
    size = (given.x.cpu().double().abs() @ given.weight.cpu().double().abs().T) * given.x_scale.cpu()[:, None].double()
    size = size * given.weight_scale.cpu().double()
    lost = 2e-3 if device != "cpu" and case.codes == F8 else 1e-6
    # bfloat16 is rounded once; with GELU on CUDA before it too, where it is steepest by a little more than its slope
    rounding = {F32: 1e-6, BF16: 2.0**-8 if case.act == "none" else 2.0**-6}[case.dtype]
    steep = 2.0**-7 if case.act != "none" and case.dtype == BF16 and device != "cpu" else 0.0
    excess = (out.cpu().double() - expected).abs() - lost * size - rounding * expected.abs() - steep - 1e-6
    worst = excess.amax().item() if excess.numel() else 0.0
    assert worst <= 0, f"{what}: off by {worst:.3g} more than rounding allows"


def check_row_is_independent(device: str, seed: int) -> None:
    """Of int8 a token's result is the same bits alone, among others and after them; sums are whole numbers."""
    case = Case(70, 144, 96, I8, F32)
    given = inputs_of(case, device, seed)
    together = gemm.gemm_q(*given.operands, dtype=F32)
    for token in (0, 33, 69):
        here = slice(token, token + 1)
        alone = gemm.gemm_q(given.x[here], given.x_scale[here], *given.operands[2:], dtype=F32)
        assert torch.equal(alone[0], together[token]), f"token {token} on {device}, seed {seed}"


def check_what_is_not_finite(device: str, seed: int) -> None:
    """A row whose scale is NaN is NaN, whole, one of scale 0 is the bias; the others know nothing of them."""
    for codes, dtype in itertools.product((I8, F8), (F32, BF16)):
        given = inputs_of(Case(20, 32, 48, codes, dtype), device, seed)
        scale = given.x_scale.clone()
        scale[3], scale[4] = float("nan"), 0.0
        out = gemm.gemm_q(given.x, scale, *given.operands[2:], dtype=dtype)
        where = f"{codes}, {dtype} on {device}, seed {seed}"
        assert out[3].isnan().all(), where
        assert given.bias is not None
        assert torch.equal(out[4], given.bias.to(dtype)), where
        assert out[5:].isfinite().all(), where


def check_large_values(device: str, seed: int) -> None:
    """Sums far beyond 16 bits: nothing overflows before the scales are applied."""
    for codes in (I8, F8):
        x = torch.full((32, 1024), quant.LARGEST[codes], device=device).to(codes)
        scale = torch.full((32,), 1e-4, device=device)
        out = gemm.gemm_q(x, scale, x, scale, dtype=BF16)
        expected = 1024 * quant.LARGEST[codes] ** 2 * 1e-8
        # a product of float8 beside a sum a thousand times as large loses what tensor cores have no bits for
        close = expected / (30 if codes == F8 and device != "cpu" else 200)
        assert ((out.float() - expected).abs() < close).all(), f"{codes} on {device}, seed {seed}"


def check_large_shapes(device: str, seed: int) -> None:
    for codes, tokens in itertools.product((I8, F8), (8704, 4097)):
        check_case(Case(tokens, 512, 1032, codes, BF16), device, seed)


def check_every_way(device: str, seed: int) -> None:
    """Each configuration and order of tiles: fewer rows and columns than a tile, some more, ends of every kind. Those
    for older cards run on this one too.
    """
    for codes in (I8, F8):
        of_older = configurations(codes, torch.cuda.get_device_capability(device), older=True)
        for way in sorted(candidate_kernels(codes, torch.device(device, 0)) | set(of_older)):
            for tokens, inputs, outputs in ((1, 16, 16), (3, 4096, 64), (130, 144, 272), (300, 528, 1040)):
                check_case(Case(tokens, inputs, outputs, codes, act="gelu_tanh"), device, seed, way)
            check_case(Case(1000, 1024, 512, codes, bias=None), device, seed, way)


def check_invariant_rows(device: str, seed: int) -> None:
    """The invariant way gives a token the same bits alone, among few and among many."""
    for codes, (inputs, outputs) in itertools.product((I8, F8), ((1024, 768), (72, 40), (3072, 136))):
        given = inputs_of(Case(700, inputs, outputs, codes), device, seed)
        many = gemm.gemm_q(*given.operands, config="invariant")
        for first, last in ((0, 1), (333, 334), (699, 700), (100, 165), (5, 600)):
            some = gemm.gemm_q(given.x[first:last], given.x_scale[first:last], *given.operands[2:], config="invariant")
            assert torch.equal(some, many[first:last]), f"{codes} {first}:{last} of {inputs}, {outputs}, seed {seed}"


def check_early_launch(device: str, seed: int) -> None:
    """A kernel that is launched while the one before it ends reads what that wrote."""
    for codes, name in itertools.product((I8, F8), ("pingpong_128x128", "pingpong_128x192", "pingpong_64x128")):
        if name not in configurations(codes, torch.cuda.get_device_capability(device)):
            continue
        given = inputs_of(Case(1500, 2048, 2048, codes, bias=None), device, seed)
        outcomes = []
        for config, apart in ((f"{name}/c1e", False), (f"{name}/c1", True)):
            x, x_scale = given.x, given.x_scale
            for _ in range(20):
                out = gemm.gemm_q(x, x_scale, *given.operands[2:], config=config)
                if apart:
                    torch.cuda.synchronize()
                # the rows' scales keep the size of what goes round
                x, x_scale = quant.quantize_rows(out / out.float().abs().amax(1, keepdim=True).to(BF16), codes)
            outcomes.append(out)
        assert torch.equal(*outcomes), f"{name}, {codes} on {device}, seed {seed}"


CHECKS: tuple[Callable[[str, int], None], ...] = (
    check_row_is_independent,
    check_what_is_not_finite,
    check_large_values,
    check_invariant_rows,
)
CUDA_CHECKS: tuple[Callable[[str, int], None], ...] = (*CHECKS, check_large_shapes, check_every_way, check_early_launch)
