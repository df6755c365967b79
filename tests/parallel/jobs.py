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
    layerwise_offload,
    lora,
    quant,
    sequence_parallel,
    step_cache,
    tensor_parallel,
    ulysses,
)
from omni_grpc.features import attention as by_role
from omni_grpc.loading.checkpoint import load_weights
from omni_grpc.nn import attention
from omni_grpc.nn.rows import JOINT, LayoutCache, Rows
from omni_grpc.nn.stack import Carry
from omni_grpc.types.errors import ConfigError, InternalError
from omni_grpc.types.spec import ModelSpec, Split
from tests.parallel import toys

Group = dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True, slots=True)
class Feature:
    """Its function, and whether it edits modules that have no weights yet."""

    apply: Callable[[nn.Module, Any, Context], None]
    before: bool = False


IN_DOUBLE = Roles(per_role={"self": Choice(backend="TORCH_SDPA", precision="float64")})
"""A choice that shows and stays close."""


def _by_role(module: nn.Module, config: Any, context: Context) -> None:
    by_role.apply(module, config or IN_DOUBLE, context)


FEATURES: Mapping[str, Feature] = {
    "tensor_parallel": Feature(tensor_parallel.apply, before=True),
    "quant": Feature(quant.apply, before=True),
    "layerwise_offload": Feature(layerwise_offload.apply, before=True),
    "lora": Feature(lora.apply),
    "attention": Feature(_by_role),
    "ulysses": Feature(ulysses.apply),
    "step_cache": Feature(step_cache.apply),
    "sequence_parallel": Feature(sequence_parallel.apply),
}
"""In the order in which they are applied."""

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


def device_of(group: Group) -> torch.device:
    """What a rank computes on: its GPU where NCCL joins them."""
    if group is None or dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def context(group: Group, spec: ModelSpec, component: str = "transformer") -> Context:
    return Context(component=component, spec=spec, device=device_of(group), dtype=torch.float32, ranks=group)


@dataclasses.dataclass
class Ran:
    """What came out, what it took, and the statistic that rows were taken apart by."""

    out: Carry
    work: Work
    norms: list[float]


@torch.inference_mode()
def run_toy(group: Group, name: str, features: Sequence[str], rows: Sequence[int], apart: bool = False) -> Ran:
    stack = toys.STACKS[name]()
    toys.weigh(stack)
    carry, batch = toys.batch(stack, rows)
    taken_apart = toys.HeaviestFirst()
    if apart:
        stack.wrap(taken_apart)
    for feature in features:
        FEATURES[feature].apply(stack, None, context(group, toys.SPEC))
    with watched() as work:
        out = stack(carry, batch)
    return Ran(out, work, taken_apart.norms)


@torch.inference_mode()
def break_down(group: Group, name: str, features: Sequence[str]) -> str:
    """What a stack says that runs into something which is not served."""
    stack = toys.STACKS[name]()
    carry, batch = toys.batch(stack, range(len(toys.ROWS)))
    for feature in features:
        FEATURES[feature].apply(stack, None, context(group, toys.SPEC))
    try:
        stack(carry, batch)
    except InternalError as error:
        return str(error)
    return ""


def tabled(splits: Mapping[str, Split]) -> ModelSpec:
    """A spec with a table for tensor parallel."""
    tables = {"transformer": splits} if splits else {}
    return dataclasses.replace(toys.SPEC, tensor_parallel=tables, weights={"transformer": toys.WIDE_WEIGHTS})


def refusal(group: Group, feature: str, module: nn.Module, splits: Mapping[str, Split] = toys.WIDE_SPLITS) -> str:
    """What a feature says to a module that it cannot edit."""
    try:
        FEATURES[feature].apply(module, None, context(group, tabled(splits)))
    except ConfigError as error:
        return str(error)
    return ""


@torch.inference_mode()
def run_wide(group: Group, folder: Path) -> tuple[Tensor, dict[str, tuple[int, ...]]]:
    """Its output, and the shapes of its weights."""
    with torch.device("meta"):
        module = toys.Wide()
    if group is not None:
        tensor_parallel.apply(module, None, context(group, tabled(toys.WIDE_SPLITS)))
    load_weights(module, folder, toys.WIDE_WEIGHTS, device="cpu", dtype=torch.float32)
    rows = Rows([(None, str(row)) for row in range(len(toys.ROWS))], toys.ROWS, LayoutCache("cpu"))
    x = torch.randn(rows.stream(JOINT).total, toys.CHANNELS, generator=torch.Generator().manual_seed(1))
    return module(x, rows), {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
