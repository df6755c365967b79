"""The loop over blocks: groups, carries, middleware, modulation; and that a block compiles once for all geometries."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from omni_grpc.nn.dual_stream import DualStreamBlock
from omni_grpc.nn.linear import activate, active
from omni_grpc.nn.parallel_single import ParallelSingleBlock
from omni_grpc.nn.rows import JOINT, LayoutCache, Row, Rows
from omni_grpc.nn.stack import Block, Stack

LAYOUTS = LayoutCache("cpu")
UNLIKE = [Row.of(txt=2, img=5), Row.of(txt=3, img=4), Row.of(txt=1, img=6)]


class Pair(Block):
    """Adds its modulation to both streams, and says which rows were active."""

    carry = ("txt", "img")

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.seen: list[Rows] = []

    def modulation(self, temb: Tensor) -> Tensor:
        return temb * self.factor

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        self.seen.append(active.get())
        return tuple(x + mod[rows.index[name]] for name, x in zip(self.carry, carry, strict=True))


class Single(Pair):
    """The same over the joint stream, times two."""

    carry = (JOINT,)

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        (joint,) = super().forward(*carry, rows=rows, mod=mod)
        return (2 * joint,)


def batch(rows: list[Row], **bound: Tensor) -> Rows:
    packed = Rows([(None, str(number)) for number in range(len(rows))], rows, LAYOUTS)
    for name, x in bound.items():
        packed.bind(name, "mod", packed.stream("mod").split(x))
    return packed


def test_groups_share_one_numbering_and_the_streams_are_joined_between_them() -> None:
    stack = Stack(dual=[Pair(1), Pair(10)], single=[Single(100)])
    temb = torch.tensor([[1.0], [2.0], [3.0]])
    tables = stack.modulation(temb)
    assert {name: tuple(table.shape) for name, table in tables.items()} == {"dual": (3, 2, 1), "single": (3, 1, 1)}
    rows = batch(UNLIKE, **tables)
    carry = {name: torch.randn(rows.stream(name).total, 1) for name in ("txt", "img")}
    out = stack(carry, rows)
    assert list(out) == ["txt", "img"]
    for name in out:
        torch.testing.assert_close(out[name], 2 * (carry[name] + 111 * temb[rows.index[name]]))


def test_middleware_goes_around_and_may_run_a_part() -> None:
    stack = Stack(dual=[Pair(1), Pair(10)], single=[Single(100)])
    calls: list[tuple[str, int, int]] = []

    def logged(name: str):
        def middleware(run):
            def around(stack, lo, hi, carry, rows):
                calls.append((name, lo, hi))
                return run(stack, lo, hi, carry, rows)

            return around

        return middleware

    def first_block_alone(run):
        def around(stack, lo, hi, carry, rows):
            return run(stack, lo + 1, hi, run(stack, lo, lo + 1, carry, rows), rows)

        return around

    stack.wrap(logged("inner"))
    stack.wrap(first_block_alone)
    stack.wrap(logged("outer"))
    rows = batch(UNLIKE, **stack.modulation(torch.ones(3, 1)))
    carry = {name: torch.zeros(rows.stream(name).total, 1) for name in ("txt", "img")}
    assert stack(carry, rows)["img"].unique().tolist() == [222]
    assert calls == [("outer", 0, 3), ("inner", 0, 1), ("inner", 1, 3)]


def test_blocks_run_with_their_rows_active() -> None:
    stack = Stack(dual=[Pair(1)])
    rows = batch(UNLIKE, **stack.modulation(torch.ones(3, 1)))
    other = batch(UNLIKE[:1])
    with activate(other):
        stack({name: torch.zeros(rows.stream(name).total, 1) for name in ("txt", "img")}, rows)
        assert stack.get_submodule("dual.0").seen == [rows]
        assert active.get() is other
    with pytest.raises(LookupError):
        active.get()


@pytest.mark.parametrize("kind", [DualStreamBlock, ParallelSingleBlock])
def test_a_block_compiles_once_for_many_rows_and_once_for_one(kind: type[Block]) -> None:
    """A block may read tensors and `longest`, never ints of the geometry: each would make one graph per batch."""
    block = kind(num_heads=2, head_size=32).requires_grad_(False)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(block, fullgraph=True, backend=counter, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    # no size is 1, nor equal to a size of the weights: torch gives equal sizes one symbol, and then makes it a constant
    sizes = [Row.of(txt=7, img=35), Row.of(txt=19, img=24), Row.of(txt=12, img=26)]
    counts = []
    for chosen in ((0, 1, 2), (0, 1), (2, 1, 0, 1), (0,), (2,)):
        temb = torch.randn(len(chosen), 64, generator=generator)
        rows = batch([sizes[number] for number in chosen], blocks=block.modulation(temb))
        tables = [torch.randn(length, 16, 2, generator=generator) for length in rows.stream(JOINT).lengths]
        rows.bind("rope", JOINT, tables)
        carry = [torch.randn(rows.stream(name).total, 64, generator=generator) for name in block.carry]
        expected = block(*carry, rows=rows, mod=rows["blocks"])
        for out, eager in zip(compiled(*carry, rows=rows, mod=rows["blocks"]), expected, strict=True):
            torch.testing.assert_close(out, eager)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] == counts[2], counts
    assert counts[3] == counts[4], counts
