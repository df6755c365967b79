"""What ranks are asked to compile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch._dynamo.testing

from omni_grpc.nn.dual_stream import DualStreamBlock
from omni_grpc.nn.rows import JOINT, MOD, LayoutCache, Row, Rows
from omni_grpc.nn.stack import Stack
from tests.parallel import toys
from tests.parallel.jobs import FEATURES, Ranked, context


@torch.inference_mode()
def compile_block(mesh: Ranked, sizes: Sequence[Row], batches: Sequence[Sequence[int]]) -> list[int]:
    """How many graphs a block with Ulysses inside has after each batch. Raises where they differ from the block."""
    stacks = [Stack(dual=[DualStreamBlock(num_heads=2, head_size=32)]) for _ in range(2)]
    for stack in stacks:
        toys.weigh(stack)
        for feature in ("ulysses", "sequence_parallel"):
            FEATURES[feature](stack, None, context(mesh, toys.SPEC))
    counter = torch._dynamo.testing.CompileCounter()
    stacks[0].get_submodule("dual.0").compile(fullgraph=True, dynamic=True, backend=counter)
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for chosen in batches:
        rows = Rows([(None, str(row)) for row in chosen], [sizes[row] for row in chosen], LayoutCache("cpu"))
        rows.bind("dual", MOD, torch.randn(len(chosen), 1, 768, generator=generator).split(1))
        rope = torch.randn(rows.stream(JOINT).total, 16, 2, generator=generator)
        rows.bind("rope", JOINT, rows.stream(JOINT).split(rope))
        carry = {name: torch.randn(rows.stream(name).total, 64, generator=generator) for name in ("txt", "img")}
        compiled, plain = (stack(carry, rows) for stack in stacks)
        for stream, x in plain.items():
            torch.testing.assert_close(compiled[stream], x)
        graphs.append(counter.frame_count)
    return graphs
