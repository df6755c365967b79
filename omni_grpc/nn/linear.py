"""Linear: the seam that quantization, tensor parallel, offload and LoRA replace or wrap."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.nn.rows import Rows
from omni_grpc.ops.linear import linear, linear_gelu_tanh
from omni_grpc.ops.quant import gelu_tanh
from omni_grpc.types.errors import InternalError

active: ContextVar[Rows] = ContextVar("active")
"""The rows that are being computed. Stack, predict and prepare set it; only wrappers of Linear that treat rows
differently may read it.
"""


@contextlib.contextmanager
def activate(rows: Rows) -> Iterator[Rows]:
    """Makes `rows` the active ones inside the `with` block."""
    token = active.set(rows)
    try:
        yield rows
    finally:
        active.reset(token)


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """What a layer has of one that is spread over the ranks of `group`: of the whole weight [out, in], `shape`, these
    slices of its inputs or of its outputs; None: all.
    """

    group: dist.ProcessGroup
    shape: tuple[int, int]
    inputs: tuple[slice, ...] | None = None
    outputs: tuple[slice, ...] | None = None


class AnyLinear(nn.Module, abc.ABC):
    """What a model uses as a linear layer: `Linear`, or what a feature put in its place or around it.

    It maps packed tokens x [T, in_features] of `stream` to [T, out_features]. A wrapper that treats rows differently
    finds the tokens of a row with `active.get().stream(self.stream)`. Lengths could not tell, because two streams of a
    batch may be equally long.
    """

    in_features: int
    out_features: int
    stream: str
    shard: Shard | None = None

    @abc.abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""

    def gelu(self, x: Tensor) -> Tensor:
        """GELU (tanh approximation) of `self(x)`, [T, in_features] -> [T, out_features]. A layer that fuses both
        overrides it.
        """
        return gelu_tanh(self(x))

    @abc.abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What a checkpoint has for this layer: name ("weight", "bias") -> shape of the whole tensor, before any
        sharding.
        """

    @abc.abstractmethod
    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Keeps what this layer needs of a checkpoint's tensor (weight [out, in], bias [out]; on the layer's device): a
        shard, a quantized copy, or the tensor itself.
        """

    def load_columns(self, name: str, tensor: Tensor, kept: Sequence[slice]) -> None:
        """`load_tensor` with these inputs of a checkpoint's weight [out, in], which comes whole. A layer whose rows
        have something in common over all inputs overrides it.
        """
        self.load_tensor(name, torch.cat([tensor[:, each] for each in kept], 1))

    def staging_buffer(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Memory on the host that a checkpoint's tensor is to be read into before `load_tensor` gets it, for a layer
        that keeps the tensor there as it is. It may be filled after `load_tensor`. None: the tensor is read to the
        device.
        """
        return None

    def full_precision(self) -> tuple[Tensor, Tensor | None]:
        """Copies in float32 of the weight [out, in] that it computes with, dequantized, and of the bias [out]. Raises
        InternalError for a layer of which this process has a part alone.
        """
        raise InternalError(f"a {type(self).__name__} cannot tell its whole weight")

    @property
    def activation_dtype(self) -> torch.dtype | None:
        """The dtype of 8 bits in which it reads activations, None for one that works in full precision. Such a layer
        takes a `nn.activations.QuantizedActivation` of that dtype in the place of x.
        """
        return None

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """The dtype of 8 bits in which it takes a checkpoint's weight as it is: "weight_scale", float32 [rows of the
        weight], and then "weight". None for one that works in full precision.
        """
        return self.activation_dtype

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, stream={self.stream}"


class Linear(AnyLinear):
    """x W^T + b, with weight [out_features, in_features] and bias [out_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, stream: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.stream = in_features, out_features, stream
        initial = nn.Linear(in_features, out_features, bias)
        self.weight = initial.weight
        self.bias: nn.Parameter | None = initial.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        return linear(x, self.weight, self.bias)

    def gelu(self, x: Tensor) -> Tensor:
        """GELU (tanh) of `self(x)` in one fused op, [T, in_features] -> [T, out_features]."""
        return linear_gelu_tanh(x, self.weight, self.bias)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters(recurse=False)}

    def full_precision(self) -> tuple[Tensor, Tensor | None]:
        """float32 [out, in] and [out]."""
        return in_float32(self.weight), None if self.bias is None else in_float32(self.bias)

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Keeps weight [out, in] or bias [out] as it is, without a copy."""
        setattr(self, name, nn.Parameter(tensor, requires_grad=False))


def in_float32(tensor: Tensor) -> Tensor:
    """A copy of a parameter [...], of any shape."""
    return tensor.detach().to(torch.float32, copy=True)


class Elsewhere(AnyLinear):
    """A linear layer that another rank has: it takes its tensors from a checkpoint and drops them. Its sizes are those
    of the checkpoint, also where other ranks have parts of it.
    """

    def __init__(self, whole: AnyLinear) -> None:
        super().__init__()
        self._shapes = whole.shapes()
        self.out_features, self.in_features = self._shapes["weight"]
        self.stream = whole.stream

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in]. Raises InternalError: nobody should have called it."""
        raise InternalError("this layer is another rank's")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Drops weight [out, in] or bias [out]."""
