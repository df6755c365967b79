"""The cache family: how much the signal of each row has changed since the step it was stored at.

Shapes: T packed tokens, C channels, R rows; row r is the tokens offsets[r] to offsets[r + 1].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omni_grpc.ops.declare import has_kernel_dtype, op


def _fake(now: Tensor, before: Sequence[Tensor], offsets: Sequence[int], known: Sequence[int]) -> Tensor:
    _check(now, before, offsets, known)
    return now.new_empty(len(before), 2, dtype=torch.float32)


@op(kernel_if=has_kernel_dtype, of=("now",), fake=_fake, mutates=("before",))
def compare_store(now: Tensor, before: Sequence[Tensor], offsets: Sequence[int], known: Sequence[int]) -> Tensor:
    """Compares each row with its stored copy and stores the row as it is now, in the same pass.

    now: [T, C]. before: R contiguous tensors in now's dtype, each [tokens of its row, C], which are overwritten with
    the row; or of no elements, for rows that are not stored. offsets: R + 1 ints. known: whether `before` holds an
    earlier row; where it does not, it is written and never read.
    Returns float32 [R, 2]: the sums of |now - before| and of |before| over the row, both 0 where nothing is known. The
    numerator and the denominator of TeaCache's relative L1 (https://arxiv.org/abs/2411.19108, eq. 4).
    The kernels add in an order that depends on the row's length alone: a row gives the same bits in every run and every
    batch. Raises RuntimeError where shapes, dtypes or devices disagree. They serve float32 and bfloat16, the reference
    everything else.
    """
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


def _check(now: Tensor, before: Sequence[Tensor], offsets: Sequence[int], known: Sequence[int]) -> None:
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
