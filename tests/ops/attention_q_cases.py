"""What 8-bit attention must hold, as plain functions: pytest runs them on the CPU, tools/gpu_test.py on a GPU.

Inputs are random and new in every run; a failure names the seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from omni_grpc.ops.attention_q import (
    HEAD_SIZE,
    PLANS,
    TILE_KEYS,
    TILE_QUERIES,
    QuantizedTiles,
    attention_q,
    attention_q_op,
    attention_quantize,
    attention_quantize_op,
)
from omni_grpc.ops.rope import parts_of
from omni_grpc.ops.rope_tiles import NORMS, qk_norm_rope_quantize_tiles, qk_norm_rope_quantize_tiles_op
from tests.ops import rope_cases

SCALE = HEAD_SIZE**-0.5
Lengths = tuple[tuple[int, int], ...]

LENGTHS: dict[str, Lengths] = {
    **{f"one row of {n}": ((n, n),) for n in (1, 63, 64, 65, 127, 128, 129, 1000)},
    "unlike rows": ((100, 100), (300, 300), (17, 17), (1, 1), (128, 128)),
    "across": ((200, 7), (40, 257), (7, 130), (64, 1), (5, 512)),
    "rows without keys or queries": ((9, 9), (0, 3), (130, 0), (0, 0), (33, 300)),
    "no keys at all": ((5, 0), (3, 0)),
    "nothing": ((0, 0),),
}


@dataclasses.dataclass(frozen=True)
class Case:
    lengths: str = "unlike rows"
    heads: int = 2
    kv_heads: int = 2
    data: str = "normal"
    plan: str = PLANS[0]

    def __str__(self) -> str:
        return f"{self.plan}-{self.lengths}-{self.heads}x{self.kv_heads}-{self.data}".replace(" ", "_")


DATA = ("huge", "tiny", "zero", "key bias", "key outliers", "value outliers", "unlike values", "peaked")
CASES = [
    *(Case(lengths, plan=plan) for plan, lengths in itertools.product(PLANS, LENGTHS)),
    *(Case(plan=plan, heads=6, kv_heads=2) for plan in PLANS),
    # many heads: of outliers few numbers make all of the error, and with few of those it is a matter of chance
    *(Case("across", heads=8, kv_heads=8, data=data, plan=plan) for data, plan in itertools.product(DATA, PLANS)),
]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q, k, v are views into one buffer [T, 3, H, D] where they are of one shape, as a model gives them."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor
    cu_k: Tensor
    lengths: Lengths

    def coded(self) -> QuantizedTiles:
        return attention_quantize(self.q, self.k, self.v, self.cu_q, self.cu_k)

    def attend(self, plan: str = PLANS[0]) -> Tensor:
        return attention_q(self.coded(), self.cu_q, self.cu_k, self.q.shape[0], SCALE, plan)


def inputs(case: Case, device: str, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    lengths = LENGTHS[case.lengths]
    at_q, at_k = ([*itertools.accumulate(column, initial=0)] for column in zip(*lengths, strict=True))
    heads = (case.heads, case.kv_heads, case.kv_heads)
    drawn = [
        torch.randn(n, h, HEAD_SIZE, generator=generator)
        for n, h in zip((at_q[-1], at_k[-1], at_k[-1]), heads, strict=True)
    ]
    q, k, v = (x.to(device, torch.bfloat16) for x in _changed(drawn, case.data))
    if q.shape == k.shape:
        q, k, v = torch.stack([q, k, v], 1).unbind(1)
    cu_q, cu_k = (torch.tensor(at, dtype=torch.int32, device=device) for at in (at_q, at_k))
    return Inputs(q, k, v, cu_q, cu_k, lengths)


def _changed(drawn: list[Tensor], data: str) -> list[Tensor]:
    q, k, v = drawn
    if data == "huge":
        return [q * 1e10, k * 1e-10, v * 1e30]
    if data == "tiny":
        return [q * 1e-20, k * 1e-25, v * 1e-20]
    if data == "zero":
        return [q * 0, k * 0, v * 0]
    if data == "key bias":
        k[..., :4] += 20
    if data == "key outliers":
        k[::50] *= 5
    if data == "value outliers":
        v[..., 3] *= 30
    if data == "unlike values":  # from tile to tile
        v *= 10.0 ** torch.linspace(-8, 2, len(v))[:, None, None]
    if data == "peaked":
        return [q * 4, k * 4, v]
    return [q, k, v]


def exact(x: Inputs) -> Tensor:
    """Written out row by row in float64, on the host."""
    q, k, v = (each.detach().cpu().double() for each in (x.q, x.k, x.v))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    out, at_q, at_k = torch.zeros_like(q), 0, 0
    for n, m in x.lengths:
        if n and m:
            scores = SCALE * torch.einsum("nhd,mhd->hnm", q[at_q : at_q + n], k[at_k : at_k + m])
            out[at_q : at_q + n] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v[at_k : at_k + m])
        at_q, at_k = at_q + n, at_k + m
    return out


def error(out: Tensor, true: Tensor) -> float:
    """Relative, over everything."""
    norm = true.double().norm()
    return ((out.cpu().double() - true.cpu().double()).norm() / norm).item() if norm > 0 else float(out.any())


LARGEST_ERROR = {"peaked": 8e-2, "key outliers": 6e-2}
"""Against attention in float64; 5e-2 of data that has no name here. e4m3 alone makes 3.7e-2 of normal data."""


def check_case(case: Case, device: str, seed: int) -> None:
    x = inputs(case, device, seed)
    about = f"{case} on {device}, seed {seed}"
    coded = x.coded()
    check_codes(coded, attention_quantize_op.reference(x.q, x.k, x.v, x.cu_q, x.cu_k), x.cu_q, x.cu_k, about)
    _poison(x.q)
    out = attention_q(coded, x.cu_q, x.cu_k, x.q.shape[0], SCALE, case.plan)
    assert out.shape == x.q.shape, about
    assert out.dtype == torch.bfloat16, about
    assert out.isfinite().all(), f"{about}: not finite"
    same = attention_q_op.reference(*coded, x.cu_q, x.cu_k, x.q.shape[0], SCALE, case.plan)
    apart = error(out, same)
    # bfloat16, and weights that are halfway between two codes
    assert apart < 6e-3, f"{about}: {apart:.2g} from the definition"
    true = exact(x)
    off = error(out, true)
    assert off < LARGEST_ERROR.get(case.data, 5e-2), f"{about}: relative error {off:.3g}"
    at = 0
    for n, m in x.lengths:
        assert m or not out[at : at + n].any(), f"{about}: a row without keys gives zeros"
        at += n


def _poison(like: Tensor) -> None:
    """Leaves what is not finite in the memory that the allocator gives next."""
    torch.full_like(like, float("nan"), memory_format=torch.contiguous_format)


def check_codes(coded: QuantizedTiles, want: Sequence[Tensor], cu_q: Tensor, cu_k: Tensor, about: str) -> None:
    """Against the definition, in the tiles that rows reach: scales to a few units in the last place, codes within a
    step, which a value halfway between two of them may be off.
    """
    used = dict.fromkeys(QuantizedTiles._fields, _used(cu_k, TILE_KEYS)) | dict.fromkeys(
        ("q", "q_scale"), _used(cu_q, TILE_QUERIES)
    )
    for name, mine, true in zip(QuantizedTiles._fields, coded, want, strict=True):
        assert mine.shape == true.shape, f"{about}: {name} has shape {tuple(mine.shape)}"
        assert mine.dtype == true.dtype, f"{about}: {name} has {mine.dtype}"
        mine, true = mine[:, used[name]], true[:, used[name]]
        if "scale" in name:
            torch.testing.assert_close(mine, true, rtol=3e-5, atol=0.0, msg=lambda text, n=name: f"{about}: {n} {text}")
            continue
        apart = (mine.double() - true.double()).abs()
        step = 1.0 if name in "qk" else (true.double().abs() / 8).clamp_min(2.0**-9)
        assert (apart <= step * 1.001).all(), f"{about}: codes of {name} are off by {apart.max().item()}"
        assert not apart.numel() or (apart > 0).double().mean() < 4e-3, f"{about}: codes of {name} differ"


def _used(cu: Tensor, size: int) -> Tensor:
    at = cu.tolist()
    used = [
        start // size + row + number
        for row, (start, end) in enumerate(itertools.pairwise(at))
        for number in range(-(-(end - start) // size))
    ]
    return torch.tensor(used, dtype=torch.int64, device=cu.device)


def _fused_cases() -> Iterator[rope_cases.Case]:
    for norm, dtype in itertools.product(NORMS, (torch.float32, torch.bfloat16)):
        affine = "" if norm == "none" else "weights"
        yield rope_cases.Case(
            (150, 331), 6, 2, HEAD_SIZE, norm=norm, dtype=torch.bfloat16, weight_dtype=dtype, affine=affine
        )
    for norm in NORMS[1:]:
        yield rope_cases.Case((300,), 4, 4, HEAD_SIZE, norm=norm, dtype=torch.bfloat16, placed=False)
        yield rope_cases.Case((300, 5), 5, 5, HEAD_SIZE, norm=norm, dtype=torch.bfloat16, view="odd")
    yield rope_cases.Case((70, 9), 3, 3, HEAD_SIZE, norm="rms", dtype=torch.bfloat16, turning=0)
    yield rope_cases.Case((70, 9), 3, 3, HEAD_SIZE, norm="rms", dtype=torch.bfloat16, turning=20)


def _offsets(total: int, seed: int) -> list[int]:
    """Of three rows, none of which has a single key: less its centre that is what rounding a sum leaves, by kernel and
    definition unlike, and codes make the most of it.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        at = [0, *sorted(torch.randint(0, total + 1, (2,), generator=generator).tolist()), total]
        if all(end - start != 1 for start, end in itertools.pairwise(at)):
            return at


def codes_are_made_where_heads_are_normed_and_turned(device: str, seed: int) -> None:
    """In one pass, of streams in any order, those of the definition."""
    for case in _fused_cases():
        given, total = rope_cases.inputs(case, device, seed), sum(case.tokens)
        cu = torch.tensor(_offsets(total, seed), dtype=torch.int32, device=device)
        made = qk_norm_rope_quantize_tiles(given.streams, given.table, given.place, cu, norm=case.norm)
        q, k, v, weights, _ = parts_of(given.streams)
        want = qk_norm_rope_quantize_tiles_op.reference(q, k, v, weights, given.table, given.place, cu, case.norm, 1e-6)
        about = f"{case} on {device}, seed {seed}"
        check_codes(made, want, cu, cu, about)
        heads = rope_cases.apply(case, given)
        apart = error(*(attention_q(each, cu, cu, total, SCALE) for each in (made, attention_quantize(*heads, cu, cu))))
        assert apart < 3e-2, f"{about}: {apart:.2g} from what two passes give"


def rows_do_not_see_each_other(device: str, seed: int) -> None:
    """A row is the same bits alone, and what is not finite stays in its row."""
    for plan in PLANS:
        x = inputs(Case("unlike rows"), device, seed)
        want = x.attend(plan)
        start, end = 100, 400
        alone = [each[start:end] for each in (x.q, x.k, x.v)]
        cu = torch.tensor([0, end - start], dtype=torch.int32, device=device)
        one = attention_q(attention_quantize(*alone, cu, cu), cu, cu, end - start, SCALE, plan)
        assert torch.equal(one, want[start:end]), f"{plan}, seed {seed}"
        x.k[start:end], x.v[start:end] = float("nan"), float("inf")
        out = x.attend(plan)
        for part in (slice(0, start), slice(end, None)):
            assert torch.equal(out[part], want[part]), f"{plan}, seed {seed}"


def nan_stays(device: str, seed: int) -> None:
    for plan in PLANS:
        for name in "qkv":
            x = inputs(Case("unlike rows"), device, seed)
            want = x.attend(plan)
            getattr(x, name)[150, 1, 5] = float("nan")
            out, there = x.attend(plan), torch.zeros_like(want, dtype=torch.bool)
            if name == "q":
                there[150, 1] = True
            elif name == "k":
                there[100:400, 1] = True
            else:
                there[100:400, 1, 5] = True
            assert torch.equal(out.isnan(), there), f"{plan}, {name}, seed {seed}"
            if name == "q":
                assert torch.equal(out[~there], want[~there]), f"{plan}, seed {seed}"


def centre_of_keys_does_not_show(device: str, seed: int) -> None:
    """A vector that all keys of a row have in common costs nothing: softmax does not see it, and neither do codes."""
    x = inputs(Case("one row of 1000"), device, seed)
    shift = torch.zeros(HEAD_SIZE, device=device, dtype=torch.bfloat16)
    shift[:8] = 64
    x.k[...] = (x.k * 2).round() / 2  # so that the sum is exact
    want, base = x.attend(), x.coded()
    x.k.add_(shift)
    torch.testing.assert_close(x.coded().k_scale, base.k_scale, rtol=1e-4, atol=0.0)
    assert error(x.attend(), want) < 6e-3, f"seed {seed}"


def plans_agree(device: str, seed: int) -> None:
    """Each to the bit in every run, and with each other but for the order in which they add up."""
    x = inputs(Case("across"), device, seed)
    first = x.attend(PLANS[0])
    for plan in PLANS:
        mine = x.attend(plan)
        assert all(torch.equal(x.attend(plan), mine) for _ in range(3)), f"{plan}, seed {seed}"
        assert error(mine, first) < 6e-3, f"{plan}, seed {seed}"


CHECKS = [
    rows_do_not_see_each_other,
    nan_stays,
    centre_of_keys_does_not_show,
    plans_agree,
    codes_are_made_where_heads_are_normed_and_turned,
]
CUDA_CHECKS = CHECKS


def refused() -> list[tuple[str, tuple[Tensor, ...]]]:
    """What the quantising op says no to, and how."""
    x = inputs(Case("one row of 65"), "cpu", 0)
    cu = x.cu_q
    return [
        ("128 channels", (x.q[..., :64], x.k[..., :64], x.v[..., :64], cu, cu)),
        ("not a multiple", (x.q[:, :1].repeat(1, 3, 1), x.k, x.v, cu, cu)),
        ("must have the same shape", (x.q, x.k[:-1], x.v, cu, cu)),
        ("int32", (x.q, x.k, x.v, cu.long(), cu)),
    ]
