"""What every attention backend must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py.

A backend that the table does not let run on a device is checked to be refused there. Inputs are random and new in every
run; a failure names the seed.
"""

from __future__ import annotations

import dataclasses
import itertools
import pkgutil
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from omni_grpc.compat import Attention, AttentionMetadata
from omni_grpc.config.backends import APART, AUTO, BACKENDS, INVARIANT, TOGETHER, Backend, candidates, choose, lack
from omni_grpc.nn.activations import attention_input
from omni_grpc.nn.query_key import Projected, attend_joint
from omni_grpc.nn.rows import LayoutCache, Row
from omni_grpc.nn.rows import Rows as NnRows
from omni_grpc.ops.attention import use_of, varlen_attention
from omni_grpc.ops.attention_kernels import (
    Offsets,
    flash_3_quantized,
    flash_3_quantized_apart,
    quantized_reference,
    sdpa,
)
from omni_grpc.ops.heads import quantize_heads
from omni_grpc.types.errors import ConfigError

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 2e-5, F16: 4e-3, BF16: 2e-2}
EIGHT_BITS = 8e-2
"""Of backends that keep some of it in 8 bits: of the whole result, relative."""
SCALE = 0.125

ON_CPU = choose(AUTO, use_of(torch.device("cpu"), F32, 64, causal=False, grouped=False))
"""What "auto" is on a CPU: without the op library it is torch's."""

LENGTHS: dict[str, list[tuple[int, int]]] = {
    "one row": [(130, 130)],
    "like rows": [(64, 64)] * 3,
    "unlike rows": [(100, 100), (300, 300), (17, 17), (1, 1)],
    "across": [(40, 7), (40, 7), (7, 130), (64, 3), (5, 1)],
    "rows without keys or queries": [(9, 9), (0, 3), (5, 0), (33, 33)],
    "no keys at all": [(5, 0), (3, 0)],
    "nothing": [(0, 0)],
}


@dataclasses.dataclass(frozen=True)
class Case:
    backend: str = AUTO
    lengths: str = "unlike rows"
    dtype: torch.dtype = BF16
    heads: int = 4
    kv_heads: int = 4
    size: int = 64
    causal: bool = False

    def __str__(self) -> str:
        dtype, kind = str(self.dtype).removeprefix("torch."), "-causal" if self.causal else ""
        shape = f"{self.heads}x{self.kv_heads}x{self.size}"
        return f"{self.backend}-{self.lengths.replace(' ', '_')}-{dtype}-{shape}{kind}"


CASES = [
    *(
        Case(backend, lengths, causal=causal)
        for backend, lengths, causal in itertools.product((AUTO, "FLASH_ATTN", *BACKENDS), LENGTHS, (False, True))
    ),
    *(Case(backend, heads=6, kv_heads=2, size=128) for backend in (AUTO, *BACKENDS)),
    *(Case(backend, lengths, dtype=F16, size=32) for backend in BACKENDS for lengths in ("across", "like rows")),
    *(Case(backend, dtype=F32, size=40, causal=causal) for backend in (AUTO, *BACKENDS) for causal in (False, True)),
    *(Case(backend, "across", dtype=F32, size=12, heads=3, kv_heads=1) for backend in (AUTO, *BACKENDS)),
    *(Case(backend, "like rows", size=256) for backend in (AUTO, *BACKENDS)),
]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q, k, v are views into one buffer [T, 3, H, D] where they are of one shape, as a model gives them."""

    q: Tensor
    k: Tensor
    v: Tensor
    host_q: Tensor
    host_k: Tensor
    lengths: list[tuple[int, int]]

    def attend(self, backend: str, causal: bool, host: bool = True) -> Tensor:
        q, k = (cu.to(self.q.device, non_blocking=True) for cu in (self.host_q, self.host_k))
        return self.attend_at(q, k, backend, causal, host)

    def attend_at(self, cu_q: Tensor, cu_k: Tensor, backend: str, causal: bool, host: bool = True) -> Tensor:
        longest = [max(column) for column in zip(*self.lengths, strict=True)]
        offsets = (self.host_q, self.host_k) if host else (None, None)
        return varlen_attention(self.q, self.k, self.v, cu_q, cu_k, *longest, SCALE, causal, backend, *offsets)


def inputs(case: Case, device: str, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    lengths = LENGTHS[case.lengths]
    queries, keys = ([*itertools.accumulate(column, initial=0)] for column in zip(*lengths, strict=True))
    if queries == keys and case.heads == case.kv_heads:
        packed = torch.randn(queries[-1], 3, case.heads, case.size, generator=generator).to(device, case.dtype)
        q, k, v = packed.unbind(1)
    else:
        shapes = [(queries[-1], case.heads), (keys[-1], case.kv_heads), (keys[-1], case.kv_heads)]
        q, k, v = (torch.randn(*shape, case.size, generator=generator).to(device, case.dtype) for shape in shapes)
    host_q, host_k = (torch.tensor(offsets, dtype=torch.int32) for offsets in (queries, keys))
    return Inputs(q, k, v, host_q, host_k, lengths)


def expected(x: Inputs, causal: bool) -> Tensor:
    """Written out row by row in float64, on the host. A NaN is one: zeros are for queries that see no key alone."""
    q, k, v = (each.detach().cpu().double() for each in (x.q, x.k, x.v))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    out, at_q, at_k = torch.zeros_like(q), 0, 0
    for n, m in x.lengths:
        if n and m:
            scores = SCALE * torch.einsum("nhd,mhd->hnm", q[at_q : at_q + n], k[at_k : at_k + m])
            if causal:
                hidden = ~torch.ones(n, m, dtype=torch.bool).tril(m - n)
                scores = scores.masked_fill(hidden, float("-inf"))
            blind = max(0, n - m) if causal else 0
            weights = scores[:, blind:].softmax(-1)
            out[at_q + blind : at_q + n] = torch.einsum("hnm,mhd->nhd", weights, v[at_k : at_k + m])
        at_q, at_k = at_q + n, at_k + m
    return out


def runs(case: Case, device: str) -> list[str]:
    """What the table lets run there, best first."""
    kind, grouped = torch.device(device), case.heads != case.kv_heads
    use = use_of(kind, case.dtype, case.size, causal=case.causal, grouped=grouped)
    return [name for name in candidates(case.backend, kind.type) if not lack(BACKENDS[name], use)]


def check_case(case: Case, device: str, seed: int) -> None:
    x, can = inputs(case, device, seed), runs(case, device)
    if not can:
        check_refused(case, x)
        return
    want = expected(x, case.causal)
    for host in (True, False):
        out = x.attend(case.backend, case.causal, host)
        assert out.is_contiguous(), f"seed {seed}"
        check_close(can[0], out.cpu(), want, case.dtype, seed)
    at = 0
    for n, m in x.lengths:
        assert m or not out[at : at + n].any(), f"a row without keys gives zeros, seed {seed}"
        at += n


def check_close(backend: str, out: Tensor, want: Tensor, dtype: torch.dtype, seed: int) -> None:
    """Element by element, but for lossy backends, whose elements may be anywhere near."""
    if BACKENDS[backend].lossy:
        off = ((out.double() - want).norm() / want.norm().clamp_min(1e-9)).item()
        assert off < EIGHT_BITS, f"{backend}, seed {seed}: {off:.3g} off"
        return
    close = TOLERANCE[dtype]
    torch.testing.assert_close(
        out.double(), want, atol=close, rtol=close, msg=lambda text: f"{backend}, seed {seed}: {text}"
    )


def check_refused(case: Case, x: Inputs) -> None:
    refusal: ConfigError | None = None
    try:
        x.attend(case.backend, case.causal)
    except ConfigError as error:
        refusal = error
    assert refusal is not None, f"{case} ran, and the table says that it cannot"
    assert refusal.reason == "ATTENTION_UNAVAILABLE"
    assert all(name in str(refusal) for name in candidates(case.backend, x.q.device.type)), refusal


def usable(device: str, dtype: torch.dtype = BF16) -> Iterator[str]:
    """Every backend that runs there, with heads of 64."""
    for name in BACKENDS:
        if runs(Case(name, dtype=dtype), device):
            yield name


def a_row_does_not_see_another(device: str, seed: int) -> None:
    for name in usable(device):
        for lengths in ("like rows", "unlike rows"):
            x = inputs(Case(name, lengths), device, seed)
            want = x.attend(name, False)
            start, end = x.lengths[0][0], x.lengths[0][0] + x.lengths[1][0]
            # what is not finite in the second row stays there, but where the table says that it may not
            bad = (1e4, -1e4) if BACKENDS[name].seeps else (float("nan"), float("inf"))
            x.k[start:end], x.v[start:end] = bad
            out = x.attend(name, False)
            for part in (slice(0, start), slice(end, None)):
                assert torch.equal(out[part], want[part]), f"{name}, {lengths}, seed {seed}"


def a_mask_is_what_the_kept_keys_give(device: str, seed: int) -> None:
    """Through the [B, S, H, D] contract, with a row that is masked out whole: zeros, and nothing that is not finite."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 40, generator=generator) < 0.5
    mask[1], mask[2, 0] = False, True
    q, k, v = (torch.randn(3, 40, 4, 64, generator=generator).to(device, BF16) for _ in range(3))
    k[~mask.to(device)], v[~mask.to(device)] = float("nan"), float("nan")
    for name in usable(device):
        attention = Attention(4, 64)
        attention.packed.backend = name
        out = attention(q, k, v, AttentionMetadata(attn_mask=mask.to(device)))
        assert not out[1].any(), f"{name}, seed {seed}"
        for row in (0, 2):
            keep = mask[row].to(device)
            scores = torch.einsum("nhd,mhd->hnm", q[row].double(), k[row, keep].double()) * 64**-0.5
            want = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v[row, keep].double())
            check_close(name, out[row], want, BF16, seed)


def doubled(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """A backend of nobody's: twice what attention is."""
    return 2 * sdpa(q, k, v, offsets, scale, causal)


def counting(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, scale: float, causal: bool) -> Tensor:
    """A backend whose result tells how many rows it computes at once."""
    out = sdpa(q, k, v, offsets, scale, causal)
    for rows, n, _, _, at, _ in offsets.runs():
        out[at : at + rows * n] += rows
    return out


MADE_UP = {
    "MADE_UP": Backend(run="tests.ops.attention_cases:doubled", what="twice", devices=(), head_most=128),
    "COUNTING": Backend(run="tests.ops.attention_cases:counting", what="and how many rows", devices=()),
}
"""What a test adds to the table, with `made_up`."""


def made_up() -> mock._patch_dict:
    return mock.patch.dict(BACKENDS, MADE_UP)  # type: ignore[arg-type]  # a dict underneath


def a_backend_is_a_row_of_the_table(device: str, seed: int) -> None:
    with made_up():
        x = inputs(Case(lengths="across", dtype=F32), device, seed)
        torch.testing.assert_close(x.attend("MADE_UP", False), 2 * x.attend("TORCH_SDPA", False))
        check_refused(Case("MADE_UP", size=256), inputs(Case(size=256), device, seed))


def nothing_waits_for_the_device(device: str, seed: int) -> None:
    """With the offsets in the host's memory, for every backend that can run."""
    for name in usable(device):
        x = inputs(Case(name, "across"), device, seed)
        cu_q, cu_k = x.host_q.to(device), x.host_k.to(device)
        x.attend_at(cu_q, cu_k, name, False)  # what is built once may wait
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            x.attend_at(cu_q, cu_k, name, False)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def rows_are_the_same_in_any_batch(device: str, seed: int) -> None:
    """Bit for bit, in the form that promises it; where a backend would see how many rows it gets, too."""
    with made_up():
        for name in (*usable(device), AUTO, "COUNTING"):
            for lengths in ("like rows", "unlike rows"):
                x = inputs(Case(name, lengths), device, seed)
                out, at = x.attend(name + INVARIANT, False), 0
                for n, m in x.lengths:
                    cu_q, cu_k = (torch.tensor([0, length], dtype=torch.int32) for length in (n, m))
                    mine = (each[at : at + n] for each in (x.q, x.k, x.v))
                    alone = Inputs(*mine, cu_q, cu_k, [(n, m)]).attend(name + INVARIANT, False)
                    assert torch.equal(out[at : at + n], alone), f"{name}, {lengths}, seed {seed}"
                    at += n


def a_row_that_is_not_finite_stays_alone_in_the_form_that_promises_it(device: str, seed: int) -> None:
    for name in usable(device):
        x = inputs(Case(name), device, seed)
        want = x.attend(name + INVARIANT, False)
        start, end = x.lengths[0][0], x.lengths[0][0] + x.lengths[1][0]
        x.q[start:end], x.k[start:end], x.v[start:end] = float("nan"), float("nan"), float("inf")
        out = x.attend(name + INVARIANT, False)
        for part in (slice(0, start), slice(end, None)):
            assert torch.equal(out[part], want[part]), f"{name}, seed {seed}"


def forms_of_a_backend_agree(device: str, seed: int) -> None:
    """One call for all rows, and one for each run of like rows."""
    for name in usable(device):
        if not BACKENDS[name].apart:
            continue
        for lengths, causal in itertools.product(LENGTHS, (False, True)):
            x = inputs(Case(name, lengths), device, seed)
            if not x.q.shape[0] or not x.k.shape[0]:
                continue
            longest = [max(column) for column in zip(*x.lengths, strict=True)]
            at = Offsets(
                cu_q=x.host_q.to(device),
                cu_k=x.host_k.to(device),
                longest_q=longest[0],
                longest_k=longest[1],
                host_q=x.host_q,
                host_k=x.host_k,
            )
            out = pkgutil.resolve_name(BACKENDS[name].apart)(x.q, x.k, x.v, at, SCALE, causal)
            check_close(name, out.cpu(), expected(x, causal), BF16, seed)


def codes_give_what_is_written_out(device: str, seed: int) -> None:
    """The kernel that multiplies codes, against what it does, not against what it approximates."""
    if "FLASH_ATTN_3_FP8" not in usable(device):
        return
    for lengths, causal, heads in itertools.product(("unlike rows", "across", "like rows"), (False, True), (4, 2)):
        x = inputs(Case("FLASH_ATTN_3_FP8", lengths, kv_heads=heads, size=128), device, seed)
        longest = [max(column) for column in zip(*x.lengths, strict=True)]
        cu_q, cu_k = x.host_q.to(device), x.host_k.to(device)
        at = Offsets(cu_q=cu_q, cu_k=cu_k, longest_q=longest[0], longest_k=longest[1], host_q=x.host_q, host_k=x.host_k)
        coded = quantize_heads(x.q, x.k, x.v, cu_q, cu_k, *longest)
        want = quantized_reference(coded, at, SCALE, causal)
        for run in (flash_3_quantized, flash_3_quantized_apart):
            off = ((run(coded, at, SCALE, causal).float() - want).norm() / want.norm()).item()
            assert off < 2e-2, f"{lengths}, causal {causal}, {heads} key heads, seed {seed}: {off:.3g} off"


def a_block_in_fp8_is_near_one_that_is_not(device: str, seed: int) -> None:
    """From projections on: norms, turns and codes in one pass, where a backend reads codes."""
    for name in ("FLASH_ATTN_3_FP8", "FP8_EMULATION"):
        if not runs(Case(name, size=128), device):
            continue
        generator = torch.Generator().manual_seed(seed)
        lengths = [(20, 300), (7, 100), (0, 5)]
        layouts = [Row.of(txt=txt, img=img) for txt, img in lengths]
        rows = NnRows([(None, "cond")] * len(lengths), layouts, LayoutCache(device))
        parts = {}
        for stream in ("txt", "img"):
            qkv = torch.randn(rows.stream(stream).total, 3, 4, 128, generator=generator).to(device, BF16)
            norms = (torch.nn.RMSNorm(128, 1e-6).to(device, BF16).requires_grad_(False) for _ in range(2))
            parts[stream] = Projected(*qkv.unbind(1), *norms)
        angles = torch.randn(rows.stream("joint").total, 64, generator=generator).to(device)
        table, attention = torch.stack([angles.cos(), angles.sin()], -1), Attention(4, 128).packed
        attention.backend = "TORCH_SDPA"
        want = attend_joint(attention, parts, table, rows).double()
        attention.backend = name
        assert attention_input(attention, parts["img"].q)
        off = ((attend_joint(attention, parts, table, rows).double() - want).norm() / want.norm()).item()
        assert 1e-3 < off < EIGHT_BITS, f"{name}, seed {seed}: {off:.3g} off"


def auto_is_the_best_that_can_run(device: str, seed: int) -> None:
    """On a GPU from Ampere on, half precision never runs on SDPA."""
    best = runs(Case(AUTO), device)[0]
    assert best in ("FLASH_ATTN_3", "FLASH_ATTN_2"), best
    x = inputs(Case(), device, seed)
    out = x.attend(AUTO, False)
    assert any(torch.equal(out, x.attend(best + form, False)) for form in (TOGETHER, APART, ""))


CHECKS = [
    a_row_does_not_see_another,
    rows_are_the_same_in_any_batch,
    a_block_in_fp8_is_near_one_that_is_not,
    a_row_that_is_not_finite_stays_alone_in_the_form_that_promises_it,
    a_mask_is_what_the_kept_keys_give,
    a_backend_is_a_row_of_the_table,
]
CUDA_CHECKS = [
    *CHECKS,
    forms_of_a_backend_agree,
    codes_give_what_is_written_out,
    nothing_waits_for_the_device,
    auto_is_the_best_that_can_run,
]
