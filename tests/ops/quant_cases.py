"""What a kernel of the quant family must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py.

Inputs are random and new in every run; a failure names the seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from omni_grpc.ops import quant

F32, BF16, F8, I8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8
CODES = (F8, I8)


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int
    channels: int
    dtype: torch.dtype = F32
    halves: str = "apart"
    """Where x and up are: apart, or the halves of one tensor."""

    def __str__(self) -> str:
        return f"{self.tokens}x{self.channels}-{str(self.dtype).removeprefix('torch.')}-{self.halves}"


def _cases() -> Iterator[Case]:
    for channels, dtype in itertools.product((1, 7, 8, 96, 1024, 1032, 3072, 3073), (F32, BF16)):
        yield Case(5, channels, dtype)
    for channels in (8200, 12288, 13824, 16384, 16392):
        yield Case(3, channels, BF16)
    for channels, dtype, halves in itertools.product((72, 68, 67), (F32, BF16), ("gate|up", "up|gate")):
        yield Case(6, channels, dtype, halves)
    for channels, halves in itertools.product((1024, 1280, 1536), ("gate|up", "up|gate")):
        yield Case(7, channels, BF16, halves)
    yield from (Case(0, 64), Case(257, 40, BF16), Case(3, 0))


CASES = tuple(_cases())


def inputs(case: Case, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """x, from far below to far above where the activations bend, and up; rows of unlike size."""
    generator = torch.Generator().manual_seed(seed)
    x, up = (torch.randn(case.tokens, case.channels, generator=generator) for _ in range(2))
    x = x * torch.logspace(-3, 1.5, case.tokens)[:, None]
    if case.halves == "apart":
        return x.to(device, case.dtype), up.to(device, case.dtype)
    first, second = (x, up) if case.halves == "gate|up" else (up, x)
    one, other = torch.cat([first, second], 1).to(device, case.dtype).chunk(2, 1)
    return (one, other) if case.halves == "gate|up" else (other, one)


def poison(like: Tensor) -> None:
    """Leaves NaN where the allocator of the GPU finds room for the next outputs."""
    if like.is_cuda:
        held = [torch.full_like(like, float("nan"), memory_format=torch.contiguous_format) for _ in range(3)]
        del held


def check_case(case: Case, device: str, seed: int) -> None:
    """Every op against its own definition in float64."""
    x, up = inputs(case, device, seed)
    where, wide, wide_up = f"{case} on {device}, seed {seed}", x.double(), up.double()
    gelu, silu = torch.nn.functional.gelu(wide, approximate="tanh"), quant.silu_mul.reference(wide, wide_up)
    poison(x)
    _check_close(f"gelu_tanh {where}", quant.gelu_tanh(x), gelu)
    poison(x)
    _check_close(f"silu_mul {where}", quant.silu_mul(x, up), silu)
    for dtype in CODES:
        poison(x)
        check_codes(f"quantize_rows {where}", *quant.quantize_rows(x, dtype), wide, dtype)
        poison(x)
        check_codes(f"gelu_tanh_quantize_rows {where}", *quant.gelu_tanh_quantize_rows(x, dtype == I8), gelu, dtype)
        poison(x)
        check_codes(f"silu_mul_quantize_rows {where}", *quant.silu_mul_quantize_rows(x, up, dtype == I8), silu, dtype)
        taken = torch.randint(max(1, case.tokens), (case.tokens,), generator=torch.Generator().manual_seed(seed))
        index = taken.to(device, torch.int32)
        poison(x)
        check_codes(f"quantize_rows by an index {where}", *quant.quantize_rows(x, dtype, index), wide[index], dtype)


def check_concat(case: Case, device: str, seed: int, channels: int) -> None:
    """x beside GELU of what is `channels` wide: x to the bit in the first columns, and the codes of both."""
    x, y = inputs(case, device, seed)[0], inputs(dataclasses.replace(case, channels=channels), device, seed + 1)[1]
    gelu = torch.nn.functional.gelu(y.double(), approximate="tanh")
    exact, where = torch.cat([x.double(), gelu], 1), f"{case} beside {channels} on {device}, seed {seed}"
    poison(exact)
    made = quant.concat_gelu_tanh(x, y)
    assert torch.equal(made[:, : case.channels], x), where
    _check_close(f"concat_gelu_tanh {where}", made, exact)
    for dtype in CODES:
        poison(exact)
        codes = quant.concat_gelu_tanh_quantize_rows(x, y, dtype == I8)
        check_codes(f"concat_gelu_tanh_quantize_rows {where}", *codes, exact, dtype)


def check_concat_of_many_widths(device: str, seed: int) -> None:
    """Widths that whole warps hold and others, on either side; heads of FLUX.1 and the inside of its feed-forward."""
    widths = (
        (3072, 12288),
        (256, 1024),
        (96, 160),
        (8, 1016),
        (1024, 8),
        (7, 9),
        (8, 1),
        (0, 64),
        (64, 0),
        (1536, 6144),
    )
    for (kept, channels), dtype in itertools.product(widths, (F32, BF16)):
        for halves in ("apart", "gate|up", "up|gate"):
            check_concat(Case(6, kept, dtype, halves), device, seed, channels)
    check_concat(Case(0, 64), device, seed, 32)
    check_concat(Case(257, 40, BF16), device, seed, 80)


def _check_close(what: str, out: Tensor, exact: Tensor) -> None:
    assert out.shape == exact.shape, f"{what}: shape {out.shape}"
    assert out.is_contiguous(), f"{what}: strides {out.stride()}"
    relative = 2.0**-8 if out.dtype is BF16 else 5e-6
    excess = (out.double() - exact).abs() - relative * exact.abs() - 1e-6
    worst = excess.amax().item() if excess.numel() else 0.0
    assert worst <= 0, f"{what}: off by {worst:.3g} more than rounding allows"


def check_codes(what: str, codes: Tensor, scales: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Each value is at most half a step from the exact one, but for what float32 loses before."""
    assert codes.dtype == dtype, f"{what}: codes of {codes.dtype}"
    assert codes.shape == exact.shape, f"{what}: codes of shape {codes.shape}"
    assert codes.is_contiguous(), f"{what}: strides {codes.stride()}"
    assert scales.dtype == F32, f"{what}: scales of {scales.dtype}"
    assert scales.shape == exact.shape[:1], f"{what}: scales of shape {scales.shape}"
    if not exact.numel():
        assert not scales.any(), f"{what}: a scale of nothing"
        return
    peak = exact.abs().amax(1)
    off = ((scales.double() * quant.LARGEST[dtype] - peak).abs() - 1e-5 * peak - 1e-4).amax().item()
    assert off <= 0, f"{what}: a scale is off by {off:.3g} of its largest value"
    step = scales.double()[:, None]
    # e4m3 has 3 bits behind the point, down to steps of 2^-9
    half = 0.5 * step if dtype is I8 else torch.maximum(exact.abs() * 2.0**-4, step * 2.0**-10)
    excess = (codes.double() * step - exact).abs() - 1.001 * half - 1e-4 * peak[:, None].clamp(max=1) - 1e-6
    assert excess.amax().item() <= 0, (
        f"{what}: {dtype} codes are off by {excess.amax().item():.3g} more than a half step"
    )
    used = codes.double().abs().amax(1)
    # torch's GELU is zero in float32 where the exact one is next to it
    assert (used[peak > 1e-5] == quant.LARGEST[dtype]).all(), f"{what}: {dtype} codes do not use the whole range"


def check_zeros_and_what_is_not_finite(device: str, seed: int) -> None:
    """Zeros read as zeros, tiny numbers as no more than they are, and a row with NaN or infinity as NaN, whole."""
    for (channels, of), dtype in itertools.product(((512, F32), (67, F32), (1024, BF16)), CODES):
        x = torch.randn(6, channels, generator=torch.Generator().manual_seed(seed)).to(device, of)
        x[1] = 0
        x[2, 3], x[3, channels - 1], x[4] = float("nan"), float("-inf"), 1e-42
        for made in (
            quant.quantize_rows(x, dtype),
            quant.silu_mul_quantize_rows(torch.full_like(x, 50.0), x, dtype == I8),
            quant.quantize_rows(x, dtype, torch.arange(6, device=device, dtype=torch.int32)),
            quant.concat_gelu_tanh_quantize_rows(x, torch.zeros_like(x), dtype == I8),
            quant.concat_gelu_tanh_quantize_rows(torch.zeros_like(x), x, dtype == I8),
        ):
            read, where = made[0].float() * made[1][:, None], f"{dtype}, {channels} channels on {device}"
            assert read.isnan().all(1).tolist() == [False, False, True, True, False, False], where
            assert made[1][1] == 0, where
            assert not read[1].any(), where
            assert read[4].abs().max() <= 1e-40, where


def check_row_is_independent(device: str, seed: int) -> None:
    """A token's result is the same bits alone and among others."""
    for channels, token in itertools.product((1536, 1544), (0, 33, 66)):
        x, up = inputs(Case(67, channels, BF16), device, seed)
        codes, scales = quant.silu_mul_quantize_rows(x, up, True)
        plain = quant.silu_mul(x, up)
        alone = quant.silu_mul_quantize_rows(x[token : token + 1], up[token : token + 1], True)
        where = f"{channels} channels, token {token} on {device}, seed {seed}"
        assert torch.equal(codes[token], alone[0][0]), where
        assert torch.equal(scales[token], alone[1][0]), where
        assert torch.equal(plain[token], quant.silu_mul(x[token : token + 1], up[token : token + 1])[0]), where


def check_many_rows(device: str, seed: int) -> None:
    """More rows than blocks run at once, in blocks of several rows and of one."""
    for tokens, channels in ((40001, 64), (9001, 3072)):
        check_case(Case(tokens, channels, BF16), device, seed)
        check_concat(Case(tokens, channels, BF16), device, seed, 2 * channels)


CHECKS: tuple[Callable[[str, int], None], ...] = (
    check_zeros_and_what_is_not_finite,
    check_row_is_independent,
    check_concat_of_many_widths,
)
CUDA_CHECKS: tuple[Callable[[str, int], None], ...] = (*CHECKS, check_many_rows)
OPS = (
    "concat_gelu_tanh",
    "concat_gelu_tanh_quantize_rows",
    "gelu_tanh",
    "gelu_tanh_quantize_rows",
    "quantize_rows",
    "silu_mul",
    "silu_mul_quantize_rows",
)
