"""What a kernel of the cache family must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omni_grpc.ops.cache import compare_store

F32, BF16 = torch.float32, torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of so many tokens; `known` and `kept` of each are drawn."""

    tokens: tuple[int, ...]
    channels: int
    dtype: torch.dtype = F32
    view: str = "whole"

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{'+'.join(map(str, self.tokens)) or 'none'}x{self.channels}-{name}-{self.view}"


CASES = tuple(
    [
        Case(tokens, channels, dtype)
        for dtype, (tokens, channels) in itertools.product(
            (F32, BF16),
            (
                ((), 8),
                ((0,), 8),
                ((1,), 1),
                ((3, 0, 5), 7),
                ((5, 3), 1024),
                ((8, 9, 1), 1024),  # a chunk, more than a chunk
                ((40, 17), 3072),
                ((301,), 333),
            ),
        )
    ]
    + [Case((2,) * 70, 24, BF16)]  # more rows than one launch takes
    + [Case((6, 7), 72, dtype, view) for dtype in (F32, BF16) for view in ("slice", "transposed")]
)


def inputs(case: Case, device: str, seed: int) -> tuple[Tensor, list[Tensor], list[int], list[bool]]:
    """now, before, offsets, known. What is not known is NaN, which shows where it is read."""
    generator = torch.Generator().manual_seed(seed)
    offsets = [0, *itertools.accumulate(case.tokens)]
    now = torch.randn(offsets[-1], case.channels, generator=generator) * 2 + 0.5
    known = torch.randint(4, (len(case.tokens),), generator=generator) > 0
    kept = torch.randint(4, (len(case.tokens),), generator=generator) > 0
    before = []
    for row, tokens in enumerate(case.tokens):
        memory = now[offsets[row] : offsets[row + 1]] + 0.3 * torch.randn(tokens, case.channels, generator=generator)
        memory = memory if known[row] else torch.full_like(memory, torch.nan)
        before.append((memory if kept[row] else memory[:0]).to(device, case.dtype).contiguous())
    return as_view(now.to(device, case.dtype), case.view), before, offsets, known.tolist()


def as_view(x: Tensor, view: str) -> Tensor:
    if view == "whole":
        return x
    if view == "transposed":
        return x.t().contiguous().t()
    table = x.new_zeros(x.shape[0], x.shape[1] + 5)
    table[:, 3 : 3 + x.shape[1]] = x
    return table[:, 3 : 3 + x.shape[1]]


def check_case(case: Case, device: str, seed: int) -> None:
    """The sums against float64, and what is remembered against the rows to the bit."""
    now, before, offsets, known = inputs(case, device, seed)
    want = compare_store.reference(
        now.double(), [memory.to(torch.float64, copy=True) for memory in before], offsets, [int(it) for it in known]
    )
    empty = [memory.numel() == 0 for memory in before]
    sums = compare_store(now, before, offsets, known)
    assert sums.shape == (len(before), 2), f"{case}: shape {sums.shape}"
    assert sums.dtype == torch.float32, f"{case}: dtype {sums.dtype}"
    assert torch.allclose(sums, want, rtol=2e-6, atol=1e-6), f"{case} on {device}, seed {seed}: {sums} not {want}"
    for row, memory in enumerate(before):
        if not empty[row]:
            same = torch.equal(memory, now[offsets[row] : offsets[row + 1]])
            assert same, f"{case} on {device}, seed {seed}: row {row} is not what is remembered"


def check_decisions_repeat(device: str, seed: int) -> None:
    """A row gives the same bits alone and in company, wherever it lies, aligned or not, and in every run."""
    for dtype, channels in ((F32, 1544), (BF16, 1544), (BF16, 77)):
        case = Case((33, 1, 64), channels, dtype)
        generator = torch.Generator().manual_seed(seed)
        now = torch.randn(98, channels, generator=generator).to(device, dtype)
        offsets = [0, 33, 34, 98]
        before = [torch.randn(n, channels, generator=generator).to(device, dtype) for n in case.tokens]

        def sums(rows: Sequence[int]) -> Tensor:
            parts = [now[offsets[row] : offsets[row + 1]] for row in rows]  # noqa: B023
            places = [0, *itertools.accumulate(len(part) for part in parts)]
            memories = [before[row].clone() for row in rows]  # noqa: B023
            return compare_store(torch.cat(parts), memories, places, [True] * len(rows))

        together = sums((0, 1, 2))
        for row in range(3):
            assert torch.equal(sums((row,))[0], together[row]), f"{dtype}, row {row} on {device}, seed {seed}"
        assert torch.equal(sums((2, 1, 0)).flip(0), together), f"{dtype}: other places, on {device}, seed {seed}"
        for _ in range(5):
            assert torch.equal(sums((0, 1, 2)), together), f"{dtype}: another run, on {device}, seed {seed}"


def check_odd_values_show(device: str, seed: int) -> None:
    for odd in (torch.nan, torch.inf):
        now, memory = torch.ones(40, 640, device=device), torch.ones(40, 640, device=device)
        now[17, 300] = odd
        (moved, norm) = compare_store(now, [memory], [0, 40], [True])[0].tolist()
        assert not moved < torch.inf, f"{odd} on {device}: {moved}"
        assert norm == 40 * 640


def check_many_chunks(device: str, seed: int) -> None:
    """As many as a long video has."""
    now = torch.ones(9000, 3072, device=device, dtype=BF16)
    memory = torch.full_like(now, 0.5)
    sums = compare_store(now, [memory], [0, 9000], [True])
    assert sums.tolist() == [[0.5 * now.numel(), 0.5 * now.numel()]], f"on {device}: {sums.tolist()}"
    assert torch.equal(memory, now)


CHECKS: tuple[Callable[[str, int], None], ...] = (check_decisions_repeat, check_odd_values_show)
CUDA_CHECKS: tuple[Callable[[str, int], None], ...] = (*CHECKS, check_many_chunks)
