"""int8 weights and activations (W8A8): per output channel, and per token as it comes.

A token's scale depends on that token alone and the sums are exact integers, so a row's result is the same in any
company.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.config import QuantizationConfig
from omni_grpc.errors import CheckpointError, ConfigError, Violation
from omni_grpc.features import Context
from omni_grpc.nn.linear import AnyLinear, Linear
from omni_grpc.nn.rows import MOD
from omni_grpc.nn.stack import Stack
from omni_grpc.ops.quant import quantize_rows

logger = logging.getLogger(__name__)

ALIGNMENT, FEWEST_ROWS = 8, 32
"""What the CUDA kernel of torch._int_mm asks for: features in multiples of 8, and more than 16 rows."""


def apply(module: nn.Module, config: QuantizationConfig, context: Context) -> None:
    """Replaces the linear layers of all blocks before they get their weights, except for modulation, which reads a few
    vectors once and is sensitive, and for layers that the operator or the model excludes.

    Raises ConfigError where no layer is left.
    """
    excluded = (*config.ignored_layers, *context.spec.sensitive_layers)
    names: dict[str, list[str]] = {}
    for checkpoint_name, place in context.places.items():
        names.setdefault(place.path, []).append(checkpoint_name)
    done, left = 0, []
    for path, linear in _linears(module):
        known_as = (path, *names.get(_outermost(path, module), ()))
        if not _fits(linear, context) or any(part in name for name in known_as for part in excluded):
            left.append(path)
            continue
        owner, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(owner), leaf, Int8Linear(linear, path))
        done += 1
    if not done:
        why = f"--quantization int8 finds no layer of {context.component} to quantise; left out: {', '.join(left)}"
        raise ConfigError(why, reason="NOTHING_QUANTIZED", violations=(Violation("quantization", why),))
    logger.info("%s: %d layers in int8, %d as they are: %s", context.component, done, len(left), ", ".join(left))
    context.effects.quantized_layers["int8"] += done


def _linears(module: nn.Module) -> list[tuple[str, Linear]]:
    """The plain linear layers of all blocks that tokens pass, by path. A subclass may have a meaning of its own."""
    return [
        (f"{path}.{name}", part)
        for path, stack in module.named_modules()
        if isinstance(stack, Stack)
        for name, part in stack.named_modules()
        if type(part) is Linear and part.stream != MOD
    ]


def _outermost(path: str, module: nn.Module) -> str:
    """The path of the layer itself, where `path` is inside of what another feature put around it."""
    owner, _, _ = path.rpartition(".")
    return _outermost(owner, module) if isinstance(module.get_submodule(owner), AnyLinear) else path


def _fits(linear: Linear, context: Context) -> bool:
    return context.device.type != "cuda" or not (linear.in_features % ALIGNMENT or linear.out_features % ALIGNMENT)


class Int8Linear(AnyLinear):
    """x W^T + b over int8: weight int8 [out, in], scale float32 [out], bias [out] in the model's dtype."""

    def __init__(self, linear: Linear, path: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.stream = linear.in_features, linear.out_features, linear.stream
        self.path = path
        self.weight = linear.weight
        self.scale = nn.Parameter(linear.weight.new_empty(linear.out_features), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        quantized, scale = quantize_rows(x, torch.int8)
        product = _product(quantized, self.weight).float() * scale[:, None] * self.scale
        return (product if self.bias is None else product + self.bias).to(x.dtype)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.out_features, self.in_features)} | (
            {} if self.bias is None else {"bias": (self.out_features,)}
        )

    def take(self, name: str, tensor: Tensor) -> None:
        """Raises CheckpointError for a weight with a row of zeros, or of values that are not finite."""
        if name == "weight":
            tensor, scale = quantize_rows(tensor, torch.int8)
            if not (scale.isfinite() & (scale > 0)).all():
                raise CheckpointError(
                    f"{self.path} has output channels without a scale: all zeros, or not finite. "
                    f"Leave it out with --ignored-layers {self.path}"
                )
            self.scale = nn.Parameter(scale, requires_grad=False)
        setattr(self, name, nn.Parameter(tensor, requires_grad=False))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """int8 [T, K] and [N, K] -> int32 [T, N], exactly."""
    tokens = x.shape[0]
    if x.is_cuda and tokens < FEWEST_ROWS:
        x = F.pad(x, (0, 0, 0, FEWEST_ROWS - tokens))
    return torch._int_mm(x, weight.t())[:tokens]
