"""The cache family: how far the signal of each row has moved since it was last seen.

Shapes: T packed tokens, C channels, R rows; row r is the tokens offsets[r] to offsets[r + 1].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omni_grpc.ops.library import declare

KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16})


def compare_store(now: Tensor, before: Sequence[Tensor], offsets: Sequence[int], known: Sequence[bool]) -> Tensor:
    """Compares each row with what is remembered of it, and remembers the row as it is now, in the same pass.

    now: [T, C]. before: R contiguous tensors in now's dtype, each [tokens of its row, C], which are overwritten with
    the row; or of no elements, where nothing is to be remembered. offsets: R + 1 ints. known: whether `before` holds
    something; where it does not, it is written and never read.
    Returns float32 [R, 2]: the sums of |now - before| and of |before| over the row, both 0 where nothing is known. The
    numerator and the denominator of TeaCache's relative L1 (https://arxiv.org/abs/2411.19108, eq. 4).
    The kernels add in an order that depends on the row's length alone: a row gives the same bits in every run, in any
    company. Raises RuntimeError where shapes, dtypes or devices disagree. They serve float32 and bfloat16, the
    reference everything else.
    """
    op = _compare_store if now.dtype in KERNEL_DTYPES else compare_store_reference
    sums: Tensor = op(now, list(before), list(offsets), [int(it) for it in known])
    return sums


def compare_store_reference(now: Tensor, before: list[Tensor], offsets: list[int], known: list[int]) -> Tensor:
    """The definition of `compare_store`."""
    _check(now, before, offsets, known)
    math = torch.promote_types(now.dtype, torch.float32)
    sums = now.new_zeros(len(before), 2, dtype=math)
    for row, (memory, is_known) in enumerate(zip(before, known, strict=True)):
        if not memory.numel():
            continue
        signal = now[offsets[row] : offsets[row + 1]]
        if is_known:
            old = memory.to(math)
            torch.stack([(signal.to(math) - old).abs().sum(), old.abs().sum()], out=sums[row])
        memory.copy_(signal)
    return sums.float()


def _compare_store_fake(now: Tensor, before: list[Tensor], offsets: list[int], known: list[int]) -> Tensor:
    _check(now, before, offsets, known)
    return now.new_empty(len(before), 2, dtype=torch.float32)


def _check(now: Tensor, before: list[Tensor], offsets: list[int], known: list[int]) -> None:
    rows = len(before)
    torch._check(now.dim() == 2, lambda: f"compare_store: now must be [T, C], got {now.dim()} dimensions")
    torch._check(
        len(offsets) == rows + 1 and len(known) == rows,
        lambda: f"compare_store: {rows} rows, {len(offsets)} offsets and {len(known)} known; there must be R + 1 and R",
    )
    for row, memory in enumerate(before):
        tokens = offsets[row + 1] - offsets[row]
        torch._check(
            0 <= offsets[row] <= offsets[row + 1] <= now.shape[0],
            lambda row=row: (
                f"compare_store: row {row} is {offsets[row]} to {offsets[row + 1]} of {now.shape[0]} tokens"
            ),
        )
        torch._check(
            memory.dtype == now.dtype and memory.device == now.device,
            lambda row=row: f"compare_store: before {row} must be of the dtype and on the device of now",
        )
        torch._check(
            memory.numel() == 0 or (memory.numel() == tokens * now.shape[1] and memory.is_contiguous()),
            lambda row=row, tokens=tokens: (
                f"compare_store: before {row} must be contiguous with {tokens} x {now.shape[1]} elements, or empty"
            ),
        )


_compare_store = declare(
    "compare_store(Tensor now, Tensor(a!)[] before, int[] offsets, int[] known) -> Tensor",
    reference=compare_store_reference,
    fake=_compare_store_fake,
)
