"""What ranks are asked to do to show that they compute at once."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import _get_default_store

from omni_grpc.features import pipeline_parallel
from omni_grpc.nn.rows import Rows
from omni_grpc.nn.stack import Carry, RunBlocks, Stack
from tests.parallel import toys
from tests.parallel.calls import Log, Passed, logged
from tests.parallel.jobs import Ranked, context

WAIT = datetime.timedelta(seconds=60)
"""After which a rank was not there when it should have been."""


def deep() -> Stack:
    """A block for each of four ranks, and one more; the form of what is passed on changes in the middle."""
    return Stack(dual=[toys.Joint() for _ in range(3)], single=[toys.Single() for _ in range(2)])


@torch.inference_mode()
def pass_on(mesh: Ranked, rows: Sequence[int], meeting: str = "", overlap: bool = True) -> Passed:
    """Runs the deep stack with pipeline parallel. With a `meeting`, of which each has a name of its own, a rank goes on
    with its second micro-batch only once the next rank has begun with the first one.
    """
    stack, log = deep(), Log()
    toys.weigh(stack)
    carry, batch = toys.batch(stack, rows)
    if mesh is None:
        return Passed(stack(carry, batch), [])
    told = context(mesh, toys.SPEC)
    computed = 0

    def watch(run: RunBlocks) -> RunBlocks:
        def watched(stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
            nonlocal computed
            log(f"compute {computed}")
            if meeting:
                store = _get_default_store()
                store.set(f"{meeting} {mesh.rank} {computed}", "begun")
                if computed and mesh.rank + 1 < mesh.sizes.world:
                    store.wait([f"{meeting} {mesh.rank + 1} {computed - 1}"], WAIT)
            computed += 1
            return run(stack, lo, hi, carry, rows)

        return watched

    stack.wrap(watch)
    pipeline_parallel.apply(stack, None, told, overlap=overlap)
    with logged(log, "isend", "irecv", "broadcast"):
        out = stack(carry, batch)
    return Passed(out, log.calls)
