"""What a kernel of the lora family must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.lora import LoraPlan, lora_add, lora_add_op
from omni_grpc.ops.quant import quantize_rows

F32, BF16, FP8, INT8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8

Part = tuple[Tensor | None, Tensor, int, float]
Run = tuple[int, int, list[Part]]


@dataclasses.dataclass(frozen=True)
class Case:
    """Runs of so many tokens, of which each has `each` of as many adapters as there are `ranks`. split: adapters have
    thirds of the outputs by themselves, with ranks r, r + 1, r + 2. biased: and a vector. apart: tokens of no run are
    between them.
    """

    tokens: tuple[int, ...]
    inputs: int
    outputs: int
    ranks: tuple[int, ...] = (4,)
    each: int = 1
    dtype: torch.dtype = F32
    codes: torch.dtype | None = None
    gelu: bool = False
    split: bool = False
    biased: bool = False
    apart: int = 0
    view: str = "whole"

    def __str__(self) -> str:
        kind = str(self.codes or self.dtype).removeprefix("torch.")
        more = [name for name in ("gelu", "split", "biased") if getattr(self, name)]
        ranks = "+".join(map(str, self.ranks))
        tokens = "+".join(map(str, self.tokens)) or "none"
        return "-".join([f"{tokens}x{self.inputs}x{self.outputs}", f"r{ranks}x{self.each}", kind, *more, self.view])


SHAPES = (
    Case((), 8, 8),
    Case((0, 3), 8, 8),
    Case((1,), 1, 1, (1,)),
    Case((5, 0, 7), 7, 13, (3, 5)),
    Case((64, 32), 128, 128, (16, 16)),
    Case((33, 70, 1), 136, 264, (16, 24), each=2),
    Case((31, 65), 520, 77, (17,), split=True, biased=True),
    Case((40, 9), 264, 384, (16, 64), each=2, split=True),
    Case((40, 9), 128, 256, (130,)),
    Case((9, 100, 3), 100, 136, (8, 4), gelu=True, apart=3),
    Case((20,) * 8, 64, 96, (16,) * 8),
    Case((3,) * 40, 40, 24, (2, 3), biased=True),  # more runs than a launch takes
    Case((5, 6), 24, 24, (4,) * 20, each=20, split=True),  # more parts than a launch takes: the reference
    Case((17, 6), 72, 72, view="slice"),
    Case((17, 6), 72, 72, view="transposed"),
)
CASES = tuple(
    [dataclasses.replace(case, dtype=dtype) for case, dtype in itertools.product(SHAPES, (F32, BF16, torch.float16))]
    + [
        dataclasses.replace(case, dtype=dtype, codes=codes)
        for case, dtype, codes in itertools.product(SHAPES[2:12], (F32, BF16), (FP8, INT8))
    ]
)


def runs_of(case: Case, draw: random.Random, number: Callable[..., Tensor]) -> list[Run]:
    """Runs with adapters that are drawn. number: makes a tensor of a size."""
    bounds = [case.outputs * third // 3 for third in range(4)] if case.split else [0, case.outputs]
    adapters: list[list[tuple[Tensor | None, Tensor, int]]] = []
    for rank in case.ranks:
        parts: list[tuple[Tensor | None, Tensor, int]] = [
            (number(rank + at, case.inputs), number(high - low, rank + at), low)
            for at, (low, high) in enumerate(itertools.pairwise(bounds))
        ]
        if case.biased:
            parts.append((None, number(case.outputs), 0))
        adapters.append(parts)
    runs: list[Run] = []
    at = case.apart
    for tokens in case.tokens:
        chosen = draw.sample(adapters, case.each)
        scaled = [(*part, scale) for parts in chosen for scale in [draw.choice((1.0, -0.5, 1.5))] for part in parts]
        runs.append((at, tokens, scaled))
        at += tokens + case.apart
    return runs


def inputs(case: Case, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor | None, list[Run]]:
    """y, x, its scale, runs."""
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)

    def number(*size: int) -> Tensor:
        return (0.5 * torch.randn(*size, generator=generator)).to(device, case.dtype)

    tokens = sum(case.tokens) + case.apart * (len(case.tokens) + 1)
    y, x, scale = number(tokens, case.outputs), 4 * number(tokens, case.inputs), None
    runs = runs_of(case, draw, number)
    if case.codes is not None:
        x, scale = quantize_rows(x, case.codes)
    return as_view(y, case.view), as_view(x, case.view), scale, runs


def as_view(x: Tensor, view: str) -> Tensor:
    if view == "whole":
        return x
    if view == "transposed":
        return x.t().contiguous().t()
    table = x.new_zeros(x.shape[0], x.shape[1] + 5)
    table[:, 3 : 3 + x.shape[1]] = x
    return table[:, 3 : 3 + x.shape[1]]


def wanted(y: Tensor, x: Tensor, scale: Tensor | None, runs: Sequence[Run], gelu: bool) -> tuple[Tensor, Tensor]:
    """The result in float64, and the sum of the magnitudes of what is added."""
    wide = x.double() if scale is None else x.float().double() * scale.double()[:, None]
    total, size = y.double().clone(), y.double().abs()
    for first, tokens, parts in runs:
        here = slice(first, first + tokens)
        for down, up, row, factor in parts:
            there, up = slice(row, row + len(up)), up.double()
            total[here, there] += factor * (up if down is None else wide[here] @ down.double().T @ up.T)
            size[here, there] += abs(factor) * (
                up.abs() if down is None else wide[here].abs() @ down.double().abs().T @ up.abs().T
            )
    return F.gelu(total, approximate="tanh") if gelu else total, size


def check_case(case: Case, device: str, seed: int) -> None:
    """Each element against float64, within the rounding of the products in between; other tokens to the bit."""
    y, x, scale, runs = inputs(case, device, seed)
    want, size = wanted(y, x, scale, runs, case.gelu)
    before = y.clone()
    lora_add(y, x, scale, LoraPlan.of(runs), case.gelu)
    eps = torch.finfo(case.dtype).eps
    wrong = (y.double() - want).abs() > 2 * eps * (1 + size)
    assert not wrong.any(), f"{case} on {device}, seed {seed}: {int(wrong.sum())} of {y.numel()} wrong"
    if not case.gelu:
        touched = torch.zeros(len(y), dtype=torch.bool)
        for first, tokens, parts in runs:
            touched[first : first + tokens] = bool(parts)
        assert torch.equal(y[~touched.to(device)], before[~touched.to(device)]), f"{case}: others, seed {seed}"


def _by_reference(y: Tensor, x: Tensor, scale: Tensor | None, plan: LoraPlan, gelu: bool) -> None:
    lora_add_op.reference(y, x, scale, plan.factors, plan.runs, plan.parts, plan.scales, gelu)


def check_bits_alone_and_in_company(device: str, seed: int) -> None:
    """A run gives the same bits alone and among others, wherever it lies, and in every call."""
    for dtype, codes, gelu in ((F32, None, False), (BF16, None, True), (BF16, FP8, False), (BF16, INT8, True)):
        if dtype == F32 and device != "cpu":
            continue
        case = Case((33, 1, 64, 70), 264, 200, (16, 3, 24), 2, dtype, codes, gelu, split=True)
        y, x, scale, runs = inputs(case, device, seed)
        together = y.clone()
        lora_add(together, x, scale, LoraPlan.of(runs), gelu)
        for first, tokens, parts in runs:
            here = slice(first, first + tokens)
            alone = y[here].clone()
            mine = None if scale is None else scale[here].clone()
            lora_add(alone, x[here].clone(), mine, LoraPlan.of([(0, tokens, parts)]), gelu)
            assert torch.equal(alone, together[here]), f"{case}: tokens from {first} on {device}, seed {seed}"


def check_other_adapters_do_not_matter(device: str, seed: int) -> None:
    """Factors that are not finite reach the tokens of their run alone."""
    case = Case((40, 24, 33), 136, 136, (16, 16), 1, BF16)
    y, x, scale, runs = inputs(case, device, seed)
    bad = [(torch.full_like(down, torch.inf), up, row, factor) for down, up, row, factor in runs[1][2]]
    alone = y.clone()
    lora_add(alone, x, scale, LoraPlan.of([runs[0], runs[2]]))
    lora_add(y, x, scale, LoraPlan.of([runs[0], (40, 24, bad), runs[2]]))
    assert not y[40:64].isfinite().any(), f"on {device}, seed {seed}: infinite factors give finite results"
    assert torch.equal(y[:40], alone[:40]), f"on {device}, seed {seed}"
    assert torch.equal(y[64:], alone[64:]), f"on {device}, seed {seed}"


def check_size_of_a_model(device: str, seed: int) -> None:
    """Qwen-Image's feed-forward: eight pictures of 1024 x 1024 would take longer than all other checks."""
    for case in (
        Case((4096, 4096), 3072, 12288, (16, 16), 1, BF16, gelu=True),
        Case((4096, 4000), 3072, 9216, (16, 64), 2, BF16, split=True),
        Case((4096,), 12288, 3072, (128,), 1, BF16, FP8),
    ):
        y, x, scale, runs = inputs(case, device, seed)
        want = y.float()
        plan = LoraPlan.of(runs)
        _by_reference(want, x if scale is not None else x.float(), scale, _as_float(plan), case.gelu)
        lora_add(y, x, scale, plan, case.gelu)
        error = (y.float() - want).abs().max() / want.abs().max()
        assert error < 0.01, f"{case} on {device}, seed {seed}: {float(error)}"


def _as_float(plan: LoraPlan) -> LoraPlan:
    return dataclasses.replace(plan, factors=[factor.float() for factor in plan.factors])


CHECKS: tuple[Callable[[str, int], None], ...] = (check_bits_alone_and_in_company, check_other_adapters_do_not_matter)
CUDA_CHECKS: tuple[Callable[[str, int], None], ...] = (*CHECKS, check_size_of_a_model)
