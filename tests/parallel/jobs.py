"""What ranks are asked to do with made-up modules. With no group, the same in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.config.roles import Choice, Roles
from omni_grpc.features import (
    Context,
    expert_parallel,
    pipeline_parallel,
    sequence_parallel,
    tensor_parallel,
    ulysses,
)
from omni_grpc.features import attention as by_role
from omni_grpc.features.quant import QuantizedLinear
from omni_grpc.loading.checkpoint import load_weights
from omni_grpc.nn import attention
from omni_grpc.nn.attention import Attention
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.mesh import Mesh
from omni_grpc.nn.rows import JOINT, MOD, LayoutCache, Row, Rows
from omni_grpc.nn.stack import Carry, Stack
from omni_grpc.types.errors import ConfigError, InternalError
from omni_grpc.types.spec import ModelSpec, Split, SplitKind, WeightMap
from tests.parallel import toys

Ranked = Mesh | None


IN_DOUBLE = Roles(per_role={"self": Choice(backend="TORCH_SDPA", precision="float64")})
"""A choice that shows and stays close."""


def _by_role(module: nn.Module, config: Any, context: Context) -> None:
    by_role.apply(module, config or IN_DOUBLE, context)


FEATURES: Mapping[str, Callable[[nn.Module, Any, Context], None]] = {
    "tensor_parallel": tensor_parallel.apply,
    "expert_parallel": expert_parallel.apply,
    "pipeline_parallel": pipeline_parallel.apply,
    "attention": _by_role,
    "ulysses": ulysses.apply,
    "sequence_parallel": sequence_parallel.apply,
}

RANKED = ("tensor_parallel", "ulysses", "sequence_parallel")
"""Those that need ranks."""


@dataclasses.dataclass
class Work:
    """What one process did: the queries and keys, head by head, of every attention that it computed, and in what."""

    queries: int = 0
    keys: int = 0
    dtypes: set[torch.dtype] = dataclasses.field(default_factory=set)


@contextlib.contextmanager
def watched() -> Iterator[Work]:
    work, compute = Work(), attention.varlen_attention

    def counted(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        work.queries += q.shape[0] * q.shape[1]
        work.keys += k.shape[0] * k.shape[1]
        work.dtypes.add(q.dtype)
        return compute(q, k, *rest)

    with mock.patch.object(attention, "varlen_attention", counted):
        yield work


def device_of(mesh: Ranked) -> torch.device:
    """What a rank computes on: its GPU where NCCL joins them."""
    if mesh is None or dist.get_backend() != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def context(mesh: Ranked, spec: ModelSpec, component: str = "transformer") -> Context:
    return Context(component=component, spec=spec, device=device_of(mesh), dtype=torch.float32, ranks=mesh)


@dataclasses.dataclass
class Ran:
    """What came out, what it took, and the statistic that rows were taken apart by."""

    out: Carry
    work: Work
    norms: list[float]


@torch.inference_mode()
def run_toy(mesh: Ranked, name: str, features: Sequence[str], rows: Sequence[int], apart: bool = False) -> Ran:
    stack = toys.STACKS[name]()
    toys.weigh(stack)
    carry, batch = toys.batch(stack, rows)
    taken_apart = toys.HeaviestFirst()
    inner = [feature for feature in features if feature == "pipeline_parallel"]
    for feature in inner:
        FEATURES[feature](stack, None, context(mesh, toys.SPEC))
    if apart:
        stack.wrap(taken_apart)
    for feature in [each for each in features if each not in inner]:
        FEATURES[feature](stack, None, context(mesh, toys.SPEC))
    with watched() as work:
        out = stack(carry, batch)
    return Ran(out, work, taken_apart.norms)


@torch.inference_mode()
def break_down(mesh: Ranked, name: str, features: Sequence[str]) -> str:
    """What a stack says that runs into something which is not served."""
    stack = toys.STACKS[name]()
    carry, batch = toys.batch(stack, range(len(toys.ROWS)))
    for feature in features:
        FEATURES[feature](stack, None, context(mesh, toys.SPEC))
    try:
        stack(carry, batch)
    except InternalError as error:
        return str(error)
    return ""


@torch.inference_mode()
def attend_ring(mesh: Ranked, lengths: Sequence[int]) -> Tensor:
    """Attention alone, of rows of these lengths: what all ranks together make, in the order of one process."""
    attention = Attention(4, 8, 2)
    stack = Stack(only=[toys.Bare(attention)])
    if mesh is not None:
        sequence_parallel.apply(stack, None, context(mesh, toys.SPEC))
    rows = [Row.of(img=length) for length in lengths]
    batch = Rows([(None, str(row)) for row in range(len(rows))], rows, LayoutCache("cpu"))
    batch.bind("only", MOD, [torch.zeros(1, 1, 1)] * len(rows))
    generator = torch.Generator().manual_seed(2)
    return stack({"img": 3 * torch.randn(sum(lengths), 64, generator=generator)}, batch)["img"]


def tabled(splits: Mapping[str, Split]) -> ModelSpec:
    """A spec with a table for tensor parallel."""
    tables = {"transformer": splits} if splits else {}
    return dataclasses.replace(toys.SPEC, tensor_parallel=tables, weights={"transformer": toys.WIDE_WEIGHTS})


@torch.inference_mode()
def run_experts(mesh: Ranked, folder: Path, experts: int, rows: Sequence[int]) -> tuple[Tensor, int]:
    """Blocks of a mixture of experts whose weights come from a checkpoint: what they make, and how many they have."""
    with torch.device("meta"):
        stack = Stack(only=[toys.Mixed(experts), toys.Mixed(experts)])
    if mesh is not None:
        told = context(mesh, toys.SPEC)
        expert_parallel.apply(stack, None, told)
        if mesh.sizes.pipeline_parallel_size > 1:
            pipeline_parallel.apply(stack, None, told)
    load_weights(stack, folder, WeightMap(), device="cpu", dtype=torch.float32)
    if mesh is not None and mesh.sizes.sequence > 1:
        sequence_parallel.apply(stack, None, told)
    streams = [toys.ROWS[row] for row in rows]
    batch = Rows([(None, str(row)) for row in rows], streams, LayoutCache("cpu"))
    batch.bind("only", MOD, [torch.zeros(row.levels, 1, 1) for row in streams])
    x = torch.randn(batch.stream("img").total, 16, generator=torch.Generator().manual_seed(1))
    return stack({"img": x}, batch)["img"], sum(parameter.numel() for parameter in stack.parameters())


def ask_first(mesh: Ranked) -> tuple[bool, dict[str, int], float]:
    """A decision and a record of rank 0, and a number of the first of the ranks that have the same rows."""
    assert mesh is not None
    number = mesh.agree(torch.tensor([float(mesh.rank)]))
    return (
        mesh.first_says(mesh.rank == 0, torch.device("cpu")),
        mesh.first_gives({"measured": mesh.rank}),
        number.item(),
    )


def refusal(mesh: Ranked, feature: str, module: nn.Module, splits: Mapping[str, Split] = toys.WIDE_SPLITS) -> str:
    """What a feature says to a module that it cannot edit."""
    told = context(mesh, tabled(splits))
    if feature.startswith("invariant "):
        feature, told = feature.removeprefix("invariant "), dataclasses.replace(told, batch_invariant=True)
    try:
        FEATURES[feature](module, None, told)
    except ConfigError as error:
        return str(error)
    return ""


@torch.inference_mode()
def run_rows_in_8_bits(mesh: Ranked, kind: torch.dtype) -> Tensor:
    """A layer in 8 bits whose inputs are spread over ranks, of tokens of which one rank has the largest values."""
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(20, 96, generator=generator), torch.randn(7, 96, generator=generator)
    weight[:, 5], x[:, 80] = weight[:, 5] * 9, x[:, 80] * 9
    module = nn.ModuleDict({"to_qkv": Linear(96, 20, bias=False, stream=JOINT)})
    kept = slice(None)
    if mesh is not None:
        tensor_parallel.apply(module, None, context(mesh, tabled({"to_qkv": Split(SplitKind.ROW)})))
        (kept,) = module["to_qkv"].shard.inputs
    path = "to_qkv" if mesh is None else "to_qkv.inner"
    module.set_submodule(path, QuantizedLinear(module.get_submodule(path), path, kind))
    layer = module.get_submodule("to_qkv")
    layer.load_tensor("weight", weight)
    return layer(x[:, kept].contiguous())


@torch.inference_mode()
def run_wide(mesh: Ranked, folder: Path) -> tuple[Tensor, dict[str, tuple[int, ...]]]:
    """Its output, and the shapes of its weights."""
    with torch.device("meta"):
        module = toys.Wide()
    if mesh is not None:
        tensor_parallel.apply(module, None, context(mesh, tabled(toys.WIDE_SPLITS)))
    load_weights(module, folder, toys.WIDE_WEIGHTS, device="cpu", dtype=torch.float32)
    rows = Rows([(None, str(row)) for row in range(len(toys.ROWS))], toys.ROWS, LayoutCache("cpu"))
    x = torch.randn(rows.stream(JOINT).total, toys.CHANNELS, generator=torch.Generator().manual_seed(1))
    return module(x, rows), {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
