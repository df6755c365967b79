"""Attention in parts: merged, they are attention to all keys."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from omni_grpc.config.backends import BACKENDS, lack
from omni_grpc.ops.attention import use_of, varlen_attention
from omni_grpc.ops.attention_kernels import Offsets
from omni_grpc.ops.attention_parts import _KERNELS, AttentionPart, attend_part, merge, part_backend
from omni_grpc.types.errors import ConfigError

HEADS, KV_HEADS, SIZE, SCALE = 6, 3, 16, 0.3
QUERIES = [3, 0, 1, 17, 8, 8]


def offsets_of(queries: list[int], keys: list[int], device: str) -> Offsets:
    host_q, host_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys)
    )
    return Offsets(
        cu_q=host_q.to(device),
        cu_k=host_k.to(device),
        longest_q=max(queries),
        longest_k=max(keys),
        host_q=host_q,
        host_k=host_k,
    )


def in_parts(device: str, dtype: torch.dtype, backend: str, seed: int) -> tuple[Tensor, Tensor]:
    """What parts of the keys make together, and what all keys make at once, of rows of random lengths; some rows have
    no keys in a part, one has none at all.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parts = [[draw.choice((0, 1, 5, 30)) for _ in QUERIES] for _ in range(3)]
    for lengths in parts:
        lengths[2] = 0
    parts[0][0] = 1
    q = torch.randn(sum(QUERIES), HEADS, SIZE, generator=generator)
    keys = [torch.randn(sum(lengths), 2, KV_HEADS, SIZE, generator=generator) * 2 for lengths in parts]
    by_row = [torch.cat(each) for each in zip(*(x.split(n) for x, n in zip(keys, parts, strict=True)), strict=True)]
    q, k, v = (x.to(device, dtype) for x in (q, *torch.cat(by_row).unbind(1)))
    every = offsets_of(QUERIES, [len(each) for each in by_row], device)
    whole = varlen_attention(
        q.float(), k.float(), v.float(), every.cu_q, every.cu_k, every.longest_q, every.longest_k, SCALE, False
    )
    use = use_of(q.device, dtype, SIZE, causal=False, grouped=True)
    made: AttentionPart | None = None
    for x, lengths in zip(keys, parts, strict=True):
        k, v = x.to(device, dtype).unbind(1)
        part = attend_part(q, k, v, offsets_of(QUERIES, lengths, device), SCALE, backend, use)
        made = part if made is None else merge(made, part)
    assert made is not None
    return made.out, whole


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_parts_make_the_whole(dtype: torch.dtype, seed: int) -> None:
    made, whole = in_parts("cpu", dtype, "auto", seed)
    assert made.dtype == dtype
    torch.testing.assert_close(made.float(), whole, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", [*_KERNELS, "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_make_the_whole_on_a_gpu(dtype: torch.dtype, name: str) -> None:
    use = use_of(torch.device("cuda"), dtype, SIZE, causal=False, grouped=True)
    if name in BACKENDS and (why := lack(BACKENDS[name], use)):
        pytest.skip(f"{name} {why}")
    for seed in range(4):
        made, whole = in_parts("cuda", dtype, name, seed)
        assert made.dtype == torch.float32
        torch.testing.assert_close(made, whole, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_a_nan_stays_nan() -> None:
    one = torch.ones(1, 1, 1)
    seen, unseen = AttentionPart(one, torch.zeros(1, 1)), AttentionPart(0 * one, torch.full((1, 1), float("-inf")))
    broken = AttentionPart(one * torch.nan, torch.full((1, 1), torch.nan))
    assert merge(unseen, unseen).out.item() == 0.0
    assert merge(unseen, seen).out.item() == 1.0
    assert merge(seen, broken).out.isnan().all()


def test_a_backend_without_logs_is_refused_by_name() -> None:
    use = use_of(torch.device("cpu"), torch.float32, SIZE, causal=False, grouped=False)
    assert part_backend("auto", use) == part_backend("TORCH_SDPA", use) == "TORCH_SDPA"
    with pytest.raises(ConfigError, match=r"INT8_EMULATION gives no log-sum-exp.*sequence_parallel_size") as caught:
        part_backend("INT8_EMULATION", use)
    assert [violation.field for violation in caught.value.violations] == ["ring_degree"]


def test_merged_rows_are_the_same_bits_wherever_they_are_in_a_batch() -> None:
    """Also those at the end of a tensor, which fill no vector of the processor."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        AttentionPart(torch.randn(37, 3, 4, generator=generator), torch.randn(37, 3, generator=generator) * 3)
        for _ in range(2)
    ]
    whole = merge(*parts)
    for first, count in itertools.product(range(30), (1, 3, 7)):
        rows = slice(first, first + count)
        out, lse = merge(*(AttentionPart(*(x[rows].clone() for x in part)) for part in parts))
        assert torch.equal(out, whole.out[rows])
        assert torch.equal(lse, whole.lse[rows])


def test_the_table_says_which_backends_give_parts() -> None:
    """By it, a ring is refused before any process starts."""
    assert {name for name, backend in BACKENDS.items() if backend.parts} == set(_KERNELS)
