"""What a kernel of the norm family must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py.

Inputs are random and new in every run; a failure names the seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from omni_grpc.ops import norm
from tests.ops.quant_cases import CODES, F8, I8, check_codes, poison

F32, BF16 = torch.float32, torch.bfloat16

KINDS: dict[str, frozenset[str]] = {
    "adaln": frozenset({"gate", "scale", "shift"}),
    "sandwich": frozenset({"gate", "scale", "weight", "y_weight", "rms", "factor"}),
    "affine": frozenset({"gate", "weight", "bias"}),
    "ungated": frozenset({"scale", "shift"}),
    "bare": frozenset(),
    "bare rms": frozenset({"rms"}),
    "all": frozenset({"gate", "scale", "shift", "weight", "bias", "y_weight"}),
}
"""Which operands there are, in the blocks that exist and at the ends of the range."""


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int
    channels: int
    rows: int = 2
    dtype: torch.dtype = F32
    modulation_dtype: torch.dtype = F32
    view: str = "whole"
    kind: str = "adaln"

    def __str__(self) -> str:
        dtypes = "-".join(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.modulation_dtype))
        return f"{self.tokens}x{self.channels}-{self.rows}rows-{dtypes}-{self.view}-{self.kind}"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A tensor is None where the kind has no such operand."""

    x: Tensor
    y: Tensor
    gate: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    index: Tensor
    weight: Tensor | None
    bias: Tensor | None
    y_weight: Tensor | None
    rms: bool
    base: float

    def of(self, dtype: torch.dtype) -> Inputs:
        return self.map(lambda tensor: tensor if tensor.dtype == torch.int32 else tensor.to(dtype))

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {name: change(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        return Inputs(**changed)

    @property
    def normed(self) -> dict[str, Any]:
        """The keywords of the norm."""
        return {"weight": self.weight, "bias": self.bias, "rms": self.rms, "base": self.base}

    @property
    def modulated(self) -> tuple[Tensor | None, Tensor | None, Tensor]:
        return self.scale, self.shift, self.index


def _cases() -> Iterator[Case]:
    # around what one warp holds, what threads hold evenly, and the widest rows that registers hold
    for channels, dtype in itertools.product((1, 7, 8, 64, 1024, 1032, 1536, 3072, 3073), (F32, BF16)):
        yield Case(5, channels, dtype=dtype, modulation_dtype=dtype)
    for channels in (2560, 3840, 5120, 8192, 8200, 16384, 16392):
        yield Case(3, channels, dtype=BF16, modulation_dtype=BF16)
    for channels in (8192, 8200):
        yield Case(2, channels, kind="all")
    for dtype, modulation_dtype in ((F32, BF16), (BF16, F32)):
        yield Case(9, 320, dtype=dtype, modulation_dtype=modulation_dtype)
    for view, dtype in itertools.product(("slice", "odd slice", "transposed"), (F32, BF16)):
        yield Case(6, 128, rows=3, dtype=dtype, modulation_dtype=dtype, view=view, kind="all")
    for kind, dtype, channels in itertools.product(KINDS, (F32, BF16), (136, 67)):
        yield Case(7, channels, dtype=dtype, modulation_dtype=F32 if kind == "affine" else dtype, kind=kind)
    # the widths that models have, whose rows come in bulk
    for channels in (2048, 4096):
        yield Case(5, channels, dtype=BF16, modulation_dtype=BF16)
    for channels in (1536, 3072, 5120):
        yield Case(5, channels, dtype=BF16, modulation_dtype=F32)
    for kind, modulation_dtype in itertools.product(KINDS, (F32, BF16)):
        yield Case(7, 1536, rows=3, dtype=BF16, modulation_dtype=modulation_dtype, kind=kind)
    for channels, view in ((3072, "slice"), (1536, "odd slice")):
        yield Case(7, channels, dtype=BF16, modulation_dtype=BF16, view=view, kind="all")
    for tokens, rows in ((0, 2), (1, 1), (257, 1), (257, 64)):
        yield Case(tokens, 96, rows=rows)
        yield Case(tokens, 1536, rows=rows, dtype=BF16, modulation_dtype=BF16)
    yield Case(4, 0)


CASES = tuple(_cases())


def inputs(case: Case, device: str, seed: int) -> Inputs:
    """x has an offset and one channel far out, as residual streams of trained models have."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, dtype: torch.dtype, factor: float = 1.0, offset: float = 0.0) -> Tensor:
        value = torch.randn(rows, case.channels, generator=generator) * factor + offset
        if offset and case.channels:
            value[:, case.channels // 2] += 300
        return _as_view(value, case.view, dtype, device)

    drawn: dict[str, Tensor] = {"x": draw(case.tokens, case.dtype, 2, 0.5), "y": draw(case.tokens, case.dtype)}
    drawn |= {name: draw(case.rows, case.modulation_dtype) for name in ("gate", "scale", "shift")}
    drawn |= {name: draw(1, case.modulation_dtype)[0] for name in ("weight", "bias", "y_weight")}
    has = KINDS[case.kind]
    index = torch.randint(case.rows, (case.tokens,), generator=generator, dtype=torch.int32).to(device)
    given: dict[str, Any] = {
        name: value if name in {"x", "y"} or name in has else None for name, value in drawn.items()
    }
    return Inputs(**given, index=index, rms="rms" in has, base=0.0 if "factor" in has else 1.0)


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
    """Every op against its own definition in float64: within the rounding of its output dtype, element by element.

    What comes after a sum is compared with the norm of that very sum: it is rounded before.
    """
    made, where = inputs(case, device, seed), f"{case} on {device}, seed {seed}"
    exact = made.of(torch.float64)
    poison(made.x)
    out = norm.norm_modulate(made.x, *made.modulated, **made.normed)
    _check_close(f"norm_modulate {where}", out, _norm_exactly(exact, exact.x), made.x)

    poison(made.x)
    total = norm.gate_add(made.x, made.y, made.gate, made.index, y_weight=made.y_weight)
    added = norm.gate_add.reference(exact.x, exact.y, exact.gate, exact.index, y_weight=exact.y_weight)
    _check_close(f"gate_add {where}", total, added, made.x)

    poison(made.x)
    both = norm.gate_add_norm_modulate(
        made.x, made.y, made.gate, *made.modulated, **made.normed, y_weight=made.y_weight
    )
    _check_close(f"sum of gate_add_norm_modulate {where}", both[0], added, made.x)
    _check_close(f"gate_add_norm_modulate {where}", both[1], _norm_exactly(exact, both[0].double()), made.x)

    for dtype in CODES:
        poison(made.x)
        codes, scales = norm.norm_modulate_quantize(made.x, *made.modulated, **made.normed, int8=dtype == I8)
        check_codes(f"norm_modulate_quantize {where}", codes, scales, _norm_exactly(exact, exact.x), dtype)
        total, codes, scales = norm.gate_add_norm_modulate_quantize(
            made.x, made.y, made.gate, *made.modulated, **made.normed, y_weight=made.y_weight, int8=dtype == I8
        )
        _check_close(f"sum of gate_add_norm_modulate_quantize {where}", total, added, made.x)
        normed = _norm_exactly(exact, total.double())
        check_codes(f"gate_add_norm_modulate_quantize {where}", codes, scales, normed, dtype)


def _norm_exactly(exact: Inputs, x: Tensor) -> Tensor:
    return norm.norm_modulate.reference(x, *exact.modulated, **exact.normed)


def _check_close(what: str, out: Tensor, exact: Tensor, x: Tensor) -> None:
    assert out.shape == x.shape, f"{what}: shape {out.shape}"
    assert out.dtype == x.dtype, f"{what}: dtype {out.dtype}"
    assert out.is_contiguous(), f"{what}: strides {out.stride()}"
    relative = 2.0**-8 if x.dtype is BF16 else 1e-5
    excess = (out.double() - exact).abs() - relative * exact.abs() - 3e-5
    worst = excess.amax().item() if excess.numel() else 0.0
    assert worst <= 0, f"{what}: off by {worst:.3g} more than rounding allows"


def check_row_is_independent(device: str, seed: int) -> None:
    """A token's result is the same bits alone and among others."""
    for kind, channels in itertools.product(("adaln", "sandwich"), (1536, 1544)):
        made = inputs(Case(131, channels, rows=4, dtype=BF16, modulation_dtype=BF16, kind=kind), device, seed)
        together = _everything(made)
        for token in (0, 64, 130):
            part = slice(token, token + 1)
            one = dataclasses.replace(made, x=made.x[part], y=made.y[part], index=made.index[part])
            for mine, alone in zip(together, _everything(one), strict=True):
                assert torch.equal(mine[token], alone[0]), f"{kind}, {channels} channels, token {token}, seed {seed}"


def _everything(made: Inputs) -> tuple[Tensor, ...]:
    codes = norm.gate_add_norm_modulate_quantize(
        made.x, made.y, made.gate, *made.modulated, **made.normed, y_weight=made.y_weight, int8=False
    )
    sums = norm.gate_add_norm_modulate(
        made.x, made.y, made.gate, *made.modulated, **made.normed, y_weight=made.y_weight
    )
    alone = norm.norm_modulate(made.x, *made.modulated, **made.normed)
    return (*(tensor.view(torch.uint8) if tensor.dtype is F8 else tensor for tensor in codes), *sums, alone)


def check_fused_is_separate(device: str, seed: int) -> None:
    """One call gives the bits of two, so a block may fuse or not."""
    for kind, channels in itertools.product(("adaln", "affine", "ungated", "sandwich"), (1536, 520, 67)):
        made = inputs(Case(40, channels, dtype=BF16, kind=kind), device, seed)
        total = norm.gate_add(made.x, made.y, made.gate, made.index, y_weight=made.y_weight)
        out = norm.norm_modulate(total, *made.modulated, **made.normed)
        both = norm.gate_add_norm_modulate(
            made.x, made.y, made.gate, *made.modulated, **made.normed, y_weight=made.y_weight
        )
        where = f"{kind}, {channels} channels on {device}, seed {seed}"
        assert torch.equal(both[0], total), f"sum, {where}"
        assert torch.equal(both[1], out), f"norm, {where}"


def check_one_row_ignores_index(device: str, seed: int) -> None:
    made = inputs(Case(40, 200, rows=1), device, seed)
    want = norm.norm_modulate.reference(made.x, made.scale, made.shift, torch.zeros_like(made.index))
    for index in (made.index + 7, None):
        out = norm.norm_modulate(made.x, made.scale, made.shift, index)
        assert torch.allclose(out, want, atol=1e-4), f"on {device}, seed {seed}"


def check_rows_that_are_not_finite(device: str, seed: int) -> None:
    """A NaN or an infinity spoils its own row, whole, and no other."""
    for channels in (1024, 512, 67):
        made = inputs(Case(6, channels, dtype=BF16), device, seed)
        made.x[2, 5], made.y[4, channels - 1] = float("nan"), float("inf")
        for dtype in CODES:
            _, codes, scales = norm.gate_add_norm_modulate_quantize(
                made.x, made.y, made.gate, *made.modulated, int8=dtype == I8
            )
            read = codes.float() * scales[:, None]
            assert read.isnan().all(1).tolist() == [False, False, True, False, True, False], f"{dtype} on {device}"
            assert read[[0, 1, 3, 5]].isfinite().all(), f"{dtype} on {device}"


def check_many_rows(device: str, seed: int) -> None:
    """More rows than blocks run at once, in blocks of several rows and of one."""
    for tokens, channels, kind in ((40001, 64, "adaln"), (9001, 1536, "sandwich")):
        case = Case(tokens, channels, rows=3, dtype=BF16, modulation_dtype=BF16, kind=kind)
        check_case(case, device, seed)


def check_current_stream(device: str, seed: int) -> None:
    """The kernel runs after what its stream did before, on whichever stream that is."""
    made = inputs(Case(4096, 1024), device, seed)
    want = norm.norm_modulate.reference(2 * made.x, *made.modulated)
    late = torch.zeros_like(made.x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.copy_(2 * made.x)
        out = norm.norm_modulate(late, *made.modulated)
    torch.cuda.synchronize()
    assert torch.allclose(out, want, atol=1e-3), f"seed {seed}: the kernel did not wait for its stream"


CHECKS: tuple[Callable[[str, int], None], ...] = (
    check_row_is_independent,
    check_fused_is_separate,
    check_one_row_ignores_index,
    check_rows_that_are_not_finite,
)
CUDA_CHECKS: tuple[Callable[[str, int], None], ...] = (*CHECKS, check_many_rows, check_current_stream)
OPS = (
    "norm_modulate",
    "norm_modulate_quantize",
    "gate_add",
    "gate_add_norm_modulate",
    "gate_add_norm_modulate_quantize",
)
