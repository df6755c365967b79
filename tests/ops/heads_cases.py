"""What a kernel of the heads family must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py.

Inputs are random and new in every run; a failure names the seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from omni_grpc.ops.heads import FLOAT8, QuantizedHeads, quantize_heads, quantize_heads_op

F32, BF16 = torch.float32, torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """lengths: queries and keys of each row."""

    lengths: tuple[tuple[int, int], ...] = ((100, 100), (17, 17), (1, 1))
    heads: int = 4
    kv_heads: int = 4
    size: int = 64
    dtype: torch.dtype = BF16
    view: str = "fused"

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return "-".join(
            f"{name}={value}".replace("torch.", "").replace(" ", "")
            for name, value in values.items()
            if value != getattr(Case, name)
        )


def _cases() -> Iterator[Case]:
    for dtype, view in itertools.product((F32, BF16), ("fused", "whole", "odd", "transposed")):
        yield Case(dtype=dtype, view=view)
    for heads, kv_heads, size in ((24, 24, 128), (40, 40, 128), (6, 2, 64), (3, 1, 20), (72, 8, 128), (1, 1, 1)):
        yield Case(heads=heads, kv_heads=kv_heads, size=size)
    yield Case(((300, 77), (5, 9), (16, 15)))
    yield Case(((0, 3), (5, 0), (33, 33)))
    yield Case(((5, 0),))
    yield Case(((0, 0),))
    yield Case(tuple((n % 7, n % 5) for n in range(300)), heads=2, kv_heads=2, size=16)


CASES = tuple(_cases())


@dataclasses.dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int

    def coded(self) -> QuantizedHeads:
        return quantize_heads(self.q, self.k, self.v, self.cu_q, self.cu_k, self.longest_q, self.longest_k)

    def reference(self) -> QuantizedHeads:
        return QuantizedHeads(
            *quantize_heads_op.reference(self.q, self.k, self.v, self.cu_q, self.cu_k, self.longest_q, self.longest_k)
        )


def inputs(case: Case, device: str, seed: int) -> Inputs:
    """One channel of every head is far out, as those of trained models are, and the last head of v is zero."""
    generator = torch.Generator().manual_seed(seed)
    columns = list(zip(*case.lengths, strict=True))
    cu_q, cu_k = (torch.tensor([*itertools.accumulate(column, initial=0)], dtype=torch.int32) for column in columns)
    made = []
    for tokens, heads in zip((cu_q[-1], cu_k[-1], cu_k[-1]), (case.heads, case.kv_heads, case.kv_heads), strict=True):
        x = torch.randn(int(tokens), heads, case.size, generator=generator)
        x[..., case.size // 2] += 20
        made.append(x)
    made[2][:, -1] = 0
    q, k, v = (_as_view(x.to(device, case.dtype), case.view) for x in made)
    return Inputs(q, k, v, cu_q.to(device), cu_k.to(device), max(columns[0]), max(columns[1]))


def _as_view(x: Tensor, view: str) -> Tensor:
    """The same numbers, laid out as the case says."""
    if view == "transposed":
        return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    start, flat = {"whole": 0, "fused": 16, "odd": 3}[view], x.flatten(1)
    return torch.cat([flat.new_zeros(len(flat), start), flat], 1)[:, start:].unflatten(1, x.shape[1:])


def check_case(case: Case, device: str, seed: int) -> None:
    x = inputs(case, device, seed)
    out, want = x.coded(), x.reference()
    for name, codes, right, given in zip("qkv", out, want, (x.q, x.k, x.v), strict=False):
        assert (codes.dtype, codes.shape) == (FLOAT8, given.shape), f"{case}: {name}"
        assert codes.is_contiguous(), f"{case}: {name}"
        # a code may be one step off, where a quotient lies half way between two
        step = (codes.float() - right.float()).abs() - 0.13 * right.float().abs() - 2**-9
        assert step.numel() == 0 or step.max() <= 0, f"{case} on {device}, seed {seed}: {name}"
    torch.testing.assert_close(out.scales, want.scales, rtol=1e-6, atol=0)
    for part, codes, given in zip((0, 1, 2), out, (x.q, x.k, x.v), strict=False):
        cu = x.cu_q if part == 0 else x.cu_k
        for row, (start, end) in enumerate(itertools.pairwise(cu.tolist())):
            scale = out.scales[part, row].repeat_interleave(codes.shape[1] // case.kv_heads)[None, :, None]
            back, exact = codes[start:end].float() * scale, given[start:end].float()
            # half a step of e4m3, of what is no smaller than its normal numbers
            excess = (back - exact).abs() - exact.abs() / 16 - scale * 2**-10
            assert excess.numel() == 0 or excess.max() <= 1e-6, f"{case} on {device}, seed {seed}, row {row}"


def what_is_not_finite_stays_in_its_row_and_head(device: str, seed: int) -> None:
    for bad in (float("nan"), float("inf")):
        x = inputs(Case(), device, seed)
        want = x.coded()
        x.k[105, 2, 7] = bad
        out = x.coded()
        back = out.k.float() * out.scales[1].repeat_interleave(x.cu_k.diff(), 0)[..., None]
        assert back[100:117, 2].isnan().all(), f"seed {seed}"
        kept = torch.ones(back.shape[:2], dtype=torch.bool, device=device)
        kept[100:117, 2] = False
        assert torch.equal(out.k.view(torch.uint8)[kept], want.k.view(torch.uint8)[kept]), f"seed {seed}"


def a_row_does_not_see_another(device: str, seed: int) -> None:
    x = inputs(Case(), device, seed)
    want = x.coded()
    x.q[100:117] *= 50
    out = x.coded()
    for part in (slice(0, 100), slice(117, None)):
        assert torch.equal(out.q.view(torch.uint8)[part], want.q.view(torch.uint8)[part]), f"seed {seed}"
    torch.testing.assert_close(out.scales[0, 1], want.scales[0, 1] * 50, rtol=1e-2, atol=0)


CHECKS = [what_is_not_finite_stays_in_its_row_and_head, a_row_does_not_see_another]
CUDA_CHECKS = CHECKS
