"""What ranks are asked to do to show what runs beside what, by the order of calls."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from omni_grpc.features import Context, hsdp, sequence_parallel, ulysses
from omni_grpc.features import attention as by_role
from omni_grpc.nn import attention, query_key
from omni_grpc.nn.dual_stream import IMG, TXT, DualStreamBlock
from omni_grpc.nn.linear import AnyLinear
from omni_grpc.nn.parallel_single import ParallelSingleBlock
from omni_grpc.nn.rows import JOINT, MOD, LayoutCache, Rows
from omni_grpc.nn.stack import Carry, RunBlocks, Stack
from omni_grpc.types.ranks import Axis
from tests.parallel import toys
from tests.parallel.calls import Log, Passed, logged
from tests.parallel.jobs import IN_DOUBLE, Ranked, context


@dataclasses.dataclass(frozen=True)
class Kind:
    """A stack, what its blocks read, and the channels of their modulation."""

    build: Callable[[], Stack]
    streams: tuple[str, ...]
    modulation: int


KINDS = {
    "single": Kind(lambda: Stack(only=[ParallelSingleBlock(4, 8)]), (TXT, IMG), 96),
    "dual": Kind(lambda: Stack(only=[DualStreamBlock(4, 8)]), (TXT, IMG), 384),
}


def _in_double(module: nn.Module, config: None, told: Context, *, overlap: bool) -> None:
    by_role.apply(module, IN_DOUBLE, told)


WAYS = {
    "Ulysses": (ulysses.apply, sequence_parallel.apply),
    "fetched": (sequence_parallel.apply,),
    "fetched in float64": (_in_double, sequence_parallel.apply),
    "ring": (sequence_parallel.apply,),
}


@torch.inference_mode()
def attend(mesh: Ranked, kind: str, way: str, rows: Sequence[int], overlap: bool) -> Passed:
    """Runs one block over ranks that share tokens, and says in which order things were called."""
    stack, log = KINDS[kind].build(), Log()
    toys.weigh(stack)
    for feature in WAYS[way]:
        feature(stack, None, context(mesh, toys.SPEC), overlap=overlap)
    for name, part in stack.named_modules():
        if isinstance(part, AnyLinear) and part.stream != MOD:
            part.register_forward_pre_hook(lambda *_, name=name: log(name.removeprefix("only.0.")))
    batch = _batch(KINDS[kind], rows)
    generator = torch.Generator().manual_seed(3)
    carry = {name: torch.randn(batch.stream(name).total, 32, generator=generator) for name in KINDS[kind].streams}
    with contextlib.ExitStack() as patches:
        for module, name in ((query_key, "qk_norm_rope"), (query_key, "qk_norm_rope_alone")):
            patches.enter_context(_logs(log, module, name, "norm"))
        for name in ("varlen_attention", "attend_part"):
            patches.enter_context(_logs(log, attention, name, "attention"))
        patches.enter_context(logged(log, "all_to_all_single", "batch_isend_irecv"))
        out = stack(carry, batch)
    return Passed(out, log.calls)


def _logs(log: Log, module: Any, name: str, call: str) -> Any:
    computed = getattr(module, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        log(call)
        return computed(*arguments, **options)

    return mock.patch.object(module, name, watched)


def _batch(kind: Kind, chosen: Sequence[int]) -> Rows:
    generator = torch.Generator().manual_seed(2)
    streams = [toys.ROWS[row] for row in chosen]
    rows = Rows([(None, str(row)) for row in chosen], streams, LayoutCache("cpu"))
    rows.bind("only", MOD, [torch.randn(row.levels, 1, kind.modulation, generator=generator) for row in streams])
    rope = torch.randn(rows.stream(JOINT).total, 4, 2, generator=generator)
    rows.bind("rope", JOINT, rows.stream(JOINT).split(rope))
    return rows


@torch.inference_mode()
def gather_weights(mesh: Ranked, overlap: bool) -> tuple[Passed, bool]:
    """Runs three blocks whose weights are sharded; and whether these come in a group of their own."""
    stack, log = Stack(single=[toys.Single() for _ in range(3)]), Log()
    assert mesh is not None

    def watch(run: RunBlocks) -> RunBlocks:
        def watched(stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
            log(f"compute {lo}")
            return run(stack, lo, hi, carry, rows)

        return watched

    stack.wrap(watch)
    hsdp.apply(stack, None, context(mesh, toys.SPEC), overlap=overlap)
    generator = torch.Generator().manual_seed(0)
    for part in stack.modules():
        if isinstance(part, hsdp.Sharded):
            for name, shape in part.shapes().items():
                part.load_tensor(name, torch.randn(shape, generator=generator) * 0.1)

    carry, batch = toys.batch(stack, range(len(toys.ROWS)))
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    with logged(log, gather):
        out = stack(carry, batch)
    calls = [call.replace(gather, "gather") for call in log.calls]
    return Passed(out, calls), mesh.groups[Axis.SHARD] is not mesh.groups[Axis.SEQUENCE]
