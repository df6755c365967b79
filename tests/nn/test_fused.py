"""How many passes over the stream a block takes between its sublayers: results alone do not show it."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omni_grpc.nn.cross_dit import TEXT_K, TEXT_V, CrossDiTBlock
from omni_grpc.nn.dual_stream import IMG, DualStreamBlock
from omni_grpc.nn.parallel_single import ParallelSingleBlock
from omni_grpc.nn.rows import JOINT, LayoutCache, Row, Rows
from omni_grpc.nn.single_stream import SingleStreamBlock
from omni_grpc.nn.stack import Block

NORM_OPS = ("norm_modulate", "gate_add", "gate_add_norm_modulate")


class Counted(TorchDispatchMode):
    """Calls of the norm family."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name().partition("::")[2]
        if name in NORM_OPS:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("block", "width", "calls"),
    [
        # norm, then sum and norm, then sum: for each of two streams
        (DualStreamBlock(2, 32), 12 * 64, (2, 2, 2)),
        (SingleStreamBlock(2, 32, 88, 48), 4 * 64, (1, 1, 1)),
        (ParallelSingleBlock(2, 32), 3 * 64, (1, 1, 0)),
        # three sublayers
        (CrossDiTBlock(2, 32, 88), 6 * 64, (1, 1, 2)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Block) else "",
)
def test_a_gated_sum_and_the_norm_behind_it_are_one_pass(block: Block, width: int, calls: tuple[int, ...]) -> None:
    rows = Rows([(None, "cond")], [Row.of(txt=3, img=8)], LayoutCache("cpu"))
    stream = IMG if isinstance(block, CrossDiTBlock) else JOINT
    rows.bind("rope", stream, [torch.randn(rows.stream(stream).total, 16, 2)])
    text = {TEXT_K: torch.randn(3, 2, 32), TEXT_V: torch.randn(3, 2, 32)} if isinstance(block, CrossDiTBlock) else {}
    carry = [torch.randn(rows.stream(name).total, 64) for name in block.carry]
    with torch.no_grad(), Counted() as counted:
        block(*carry, rows=rows, mod=torch.randn(1, width), **text)
    assert tuple(counted.calls[name] for name in NORM_OPS) == calls
