"""What a kernel of the norm family must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py.

Inputs are random and new in every run; a failure names the seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from omni_grpc.ops.norm import norm_modulate, norm_modulate_reference

F32, BF16 = torch.float32, torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int
    channels: int
    rows: int = 2
    dtype: torch.dtype = F32
    modulation_dtype: torch.dtype = F32
    view: str = "whole"

    def __str__(self) -> str:
        dtypes = "-".join(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.modulation_dtype))
        return f"{self.tokens}x{self.channels}-{self.rows}rows-{dtypes}-{self.view}"


def _cases() -> Iterator[Case]:
    for channels, dtype in itertools.product((1, 7, 8, 64, 1536, 3072, 3073), (F32, BF16)):
        yield Case(5, channels, dtype=dtype, modulation_dtype=dtype)
    for channels in (5120, 8192, 8200, 16384, 16392):  # around the widest row that CUDA threads hold in registers
        yield Case(3, channels, dtype=BF16, modulation_dtype=BF16)
    for dtype, modulation_dtype in ((F32, BF16), (BF16, F32)):
        yield Case(9, 320, dtype=dtype, modulation_dtype=modulation_dtype)
    for view, dtype in itertools.product(("slice", "odd slice", "transposed"), (F32, BF16)):
        yield Case(6, 128, rows=3, dtype=dtype, modulation_dtype=dtype, view=view)
    for tokens, rows in ((0, 2), (1, 1), (257, 1), (257, 64)):
        yield Case(tokens, 96, rows=rows)


CASES = tuple(_cases())


def inputs(case: Case, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, scale, shift, index. x has an offset and one channel far out, as residual streams of trained models have."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, dtype: torch.dtype) -> Tensor:
        return _as_view(torch.randn(rows, case.channels, generator=generator), case.view, dtype, device)

    x = draw(case.tokens, F32)
    x = x * 2 + 0.5
    x[:, case.channels // 2] += 300
    index = torch.randint(case.rows, (case.tokens,), generator=generator, dtype=torch.int32).to(device)
    scale, shift = draw(case.rows, case.modulation_dtype), draw(case.rows, case.modulation_dtype)
    return _as_view(x, case.view, case.dtype, device), scale, shift, index


def _as_view(value: Tensor, view: str, dtype: torch.dtype, device: str) -> Tensor:
    """The same numbers, laid out as the case says."""
    rows, channels = value.shape
    if view == "whole":
        return value.to(device, dtype)
    if view == "transposed":
        return value.to(device, dtype).t().contiguous().t()
    start = {"slice": 64, "odd slice": 3}[view]  # 3 elements in: no address is a multiple of 16
    table = torch.zeros(rows, channels + 200, device=device, dtype=dtype)
    table[:, start : start + channels] = value
    return table[:, start : start + channels]


def check_case(case: Case, device: str, seed: int) -> None:
    """The op against its own definition in float64: within the rounding of its output dtype, element by element."""
    x, scale, shift, index = inputs(case, device, seed)
    out = norm_modulate(x, scale, shift, index)
    exact = norm_modulate_reference(x.double(), scale.double(), shift.double(), index)
    assert out.shape == x.shape, f"{case}: shape {out.shape}"
    assert out.dtype == x.dtype, f"{case}: dtype {out.dtype}"
    assert out.is_contiguous(), f"{case}: strides {out.stride()}"
    relative = 2.0**-8 if case.dtype is BF16 else 1e-5
    excess = (out.double() - exact).abs() - relative * exact.abs() - 1e-5 * (1 + scale.double().abs().amax())
    worst = excess.amax().item() if excess.numel() else 0.0
    assert worst <= 0, f"{case} on {device}, seed {seed}: off by {worst:.3g} more than rounding allows"


def check_row_is_independent(device: str, seed: int) -> None:
    """A token's result is the same bits alone and among others."""
    x, scale, shift, index = inputs(Case(131, 1544, rows=4, dtype=BF16, modulation_dtype=BF16), device, seed)
    together = norm_modulate(x, scale, shift, index)
    for token in (0, 64, 130):
        alone = norm_modulate(x[token : token + 1], scale, shift, index[token : token + 1])
        assert torch.equal(together[token], alone[0]), f"token {token} on {device}, seed {seed}"


def check_one_row_ignores_index(device: str, seed: int) -> None:
    x, scale, shift, index = inputs(Case(40, 200, rows=1), device, seed)
    want = norm_modulate_reference(x, scale, shift, torch.zeros_like(index))
    assert torch.allclose(norm_modulate(x, scale, shift, index + 7), want, atol=1e-4), f"on {device}, seed {seed}"


def check_current_stream(device: str, seed: int) -> None:
    """The kernel runs after what its stream did before, on whichever stream that is."""
    x, scale, shift, index = inputs(Case(4096, 1024), device, seed)
    want = norm_modulate_reference(2 * x, scale, shift, index)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.copy_(2 * x)
        out = norm_modulate(late, scale, shift, index)
    torch.cuda.synchronize()
    assert torch.allclose(out, want, atol=1e-3), f"seed {seed}: the kernel did not wait for its stream"


CHECKS: tuple[Callable[[str, int], None], ...] = (check_row_is_independent, check_one_row_ignores_index)
CUDA_CHECKS: tuple[Callable[[str, int], None], ...] = (*CHECKS, check_current_stream)
