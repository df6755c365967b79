"""Weights and activations in 8 bits (W8A8), float8 e4m3 or int8: one scale per output channel and one per token,
computed as the tokens come.

Weights are quantized one by one while they are loaded, or are stored in 8 bits in the checkpoint. A token's scale
depends on that token alone, so its result does not depend on the batch (see ops.gemm for sums of float8 on a GPU).
"""

from __future__ import annotations

import collections
import fnmatch
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.config import QuantizationConfig
from omni_grpc.features import Context
from omni_grpc.nn.activations import QuantizedActivation, quantize
from omni_grpc.nn.linear import AnyLinear, Linear, in_float32
from omni_grpc.nn.rows import MOD
from omni_grpc.nn.stack import Stack
from omni_grpc.ops.gemm import FP8_CAPABILITY, gemm_q
from omni_grpc.ops.gemm_kernels import AUTO, INVARIANT, has_invariant
from omni_grpc.ops.quant import quantize_rows, row_peaks
from omni_grpc.types.errors import CheckpointError, ConfigError, Violation
from omni_grpc.types.results import RequestWarning

logger = logging.getLogger(__name__)

CODES: Mapping[str, torch.dtype] = MappingProxyType({"fp8": torch.float8_e4m3fn, "int8": torch.int8})
"""The dtype of each scheme, by its name for --quantization."""

NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in CODES.items()})


def apply(module: nn.Module, config: QuantizationConfig, context: Context) -> None:
    """Replaces linear layers of the blocks before they get their weights: those that the checkpoint stores in 8 bits,
    or if it stores none, all layers that tokens pass through. Excluded are modulation, which reads a few vectors once
    and is sensitive, and what the operator or the model excludes.

    Raises ConfigError where no layer is left, where the checkpoint is quantized differently than asked for, and for
    float8 on a device without float8 GEMM.
    """
    stored = {place.path: place.codes for place in context.places.values() if place.codes is not None}
    asked = CODES.get(config.quantization or "")
    if asked is None and not stored:
        if config.ignored_layers and config.quantization is None:
            raise _refused("ignored_layers", "--ignored-layers leaves out layers of --quantization, which is not given")
        return
    if asked is not None and (others := {NAMES[kind] for kind in stored.values()} - {NAMES[asked]}):
        why = f"--quantization {NAMES[asked]}: the weights of {context.component} are stored in {', '.join(others)}"
        raise _refused("quantization", f"{why}; start without the flag, or from a checkpoint in full precision")
    chosen, left = _choose(module, stored, asked, config, context)
    for kind in set(chosen.values()):
        _check_device(kind, context)
    way = INVARIANT if context.batch_invariant else AUTO
    for path, kind in chosen.items():
        linear = module.get_submodule(path)
        assert isinstance(linear, Linear)
        owner, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(owner), leaf, QuantizedLinear(linear, path, kind, config=way))
    if not chosen:
        why = f"finds no layer of {context.component} to quantize; left out: {', '.join(left)}"
        raise _refused("quantization", f"--quantization {config.quantization} {why}", reason="NOTHING_QUANTIZED")
    context.effects.count_quantized(collections.Counter(NAMES[kind] for kind in chosen.values()), kept=len(left))
    kinds = " and ".join(sorted({NAMES[kind] for kind in chosen.values()}))
    kept = f", {len(left)} in full precision: {', '.join(left)}" if left else ""
    logger.info("%s: %d layers in %s%s", context.component, len(chosen), kinds, kept)


def _choose(
    module: nn.Module,
    stored: Mapping[str, torch.dtype],
    asked: torch.dtype | None,
    config: QuantizationConfig,
    context: Context,
) -> tuple[dict[str, torch.dtype], list[str]]:
    """The dtype of each layer to be quantized, by path, and the paths of the other layers of the blocks that tokens
    pass through.
    """
    names: dict[str, list[str]] = {}
    for checkpoint_name, place in context.places.items():
        names.setdefault(place.path, []).append(checkpoint_name)
    chosen, left, unused = {}, [], set(config.ignored_layers)
    for path, linear in _linears(module):
        outer = _outermost(path, module)
        known_as = (path, *names.get(outer, ()))
        ignored = {pattern for pattern in config.ignored_layers if _named(pattern, known_as)}
        unused -= ignored
        if stored:
            kind = stored.get(outer)
        else:
            sensitive = linear.stream == MOD or any(_named(p, known_as) for p in context.spec.sensitive_layers)
            kind = None if sensitive else asked
        if kind is not None and not ignored:
            chosen[path] = kind
        elif linear.stream != MOD:
            left.append(path)
    for pattern in sorted(unused):
        logger.warning("--ignored-layers %s: no layer of %s is called that", pattern, context.component)
    return chosen, left


def _linears(module: nn.Module) -> list[tuple[str, Linear]]:
    """The plain linear layers of all blocks, by path. Subclasses are left out, because they may do something else."""
    return [
        (f"{path}.{name}", part)
        for path, stack in module.named_modules()
        if isinstance(stack, Stack)
        for name, part in stack.named_modules()
        if type(part) is Linear
    ]


def _outermost(path: str, module: nn.Module) -> str:
    """The path of the outermost layer that wraps the one at `path`: the name by which checkpoints know it."""
    owner, _, _ = path.rpartition(".")
    return _outermost(owner, module) if isinstance(module.get_submodule(owner), AnyLinear) else path


def _named(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern matches one of the names: "re:" and a regular expression to search for, a path with `*` for any
    part of it, or a substring.
    """
    if pattern.startswith("re:"):
        return any(re.search(pattern[3:], name) for name in names)
    if "*" in pattern:
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)
    return any(pattern in name for name in names)


def _check_device(kind: torch.dtype, context: Context) -> None:
    if kind != torch.float8_e4m3fn:
        return
    if context.device.type == "cuda":
        capability = torch.cuda.get_device_capability(context.device)
        if capability < FP8_CAPABILITY:
            card, needed = ".".join(map(str, capability)), ".".join(map(str, FP8_CAPABILITY))
            why = (
                f"fp8 needs a GPU of compute capability {needed}, {context.device} has {card}; use --quantization int8"
            )
            raise _refused("quantization", why, reason="QUANTIZATION_NOT_SUPPORTED")
        if context.batch_invariant and not has_invariant(kind, context.dtype, context.device):
            why = (
                f"products of fp8 in {context.dtype} are torch's on {context.device}, which adds up by the number of "
                "tokens; leave out --batch-invariant, or use --quantization int8"
            )
            raise _refused("batch_invariant", why, reason="QUANTIZATION_NOT_SUPPORTED")
        return
    message = "fp8 saves memory on a CPU and costs time, as it has no products of float8; int8 saves both"
    warning = RequestWarning(code="QUANTIZATION_WITHOUT_SPEED", field="", message=message, applied="fp8")
    context.effects.warn(warning)


def _refused(setting: str, why: str, reason: str = ConfigError.default_reason) -> ConfigError:
    return ConfigError(why, reason=reason, violations=(Violation(setting, why),))


class QuantizedLinear(AnyLinear):
    """x W^T + b in 8 bits: weight [out, in] in `kind`, scale float32 [out], bias [out] in the model's dtype. `config`
    is the GEMM configuration, see gemm_q.
    """

    def __init__(self, linear: Linear, path: str, kind: torch.dtype, *, config: str = AUTO) -> None:
        super().__init__()
        self.in_features, self.out_features, self.stream = linear.in_features, linear.out_features, linear.stream
        self.path, self.kind, self.config, self.shard = path, kind, config, linear.shard
        self.weight = linear.weight
        self.scale = nn.Parameter(linear.weight.new_empty(linear.out_features), requires_grad=False)
        self.bias = linear.bias

    @property
    def activation_dtype(self) -> torch.dtype:
        return self.kind

    def forward(self, x: Tensor | QuantizedActivation) -> Tensor:
        """x [T, in], quantized here or already -> [T, out] in the dtype that x has or had before quantization."""
        if isinstance(x, Tensor) and self.shard is not None and self.shard.inputs is not None:
            # one process has the scale of the whole token
            peak = row_peaks(x)
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.shard.group)
            x = quantize(x, self.kind, peak=peak)
        elif isinstance(x, Tensor):
            x = quantize(x, self.kind)
        return gemm_q(x.codes, x.scale, self.weight, self.scale, self.bias, dtype=x.dtype, config=self.config)

    def full_precision(self) -> tuple[Tensor, Tensor | None]:
        """float32 [out, in] and [out]."""
        weight = in_float32(self.weight) * self.scale.detach()[:, None]
        return weight, None if self.bias is None else in_float32(self.bias)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.out_features, self.in_features)} | (
            {} if self.bias is None else {"bias": (self.out_features,)}
        )

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Keeps weight [out, in], quantized unless it is in `kind` already, weight_scale float32 [out] or bias [out].

        Raises CheckpointError for a weight that has a row of zeros or values that are not finite.
        """
        if name == "weight_scale":
            self.scale = nn.Parameter(tensor, requires_grad=False)
            return
        if name == "weight" and tensor.dtype != self.kind:
            tensor = self._quantized(tensor)
        setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    def load_columns(self, name: str, tensor: Tensor, kept: Sequence[slice]) -> None:
        """`load_tensor` with some inputs of a weight [out, in]: a row's scale is that of all of them."""
        if name == "weight" and tensor.dtype != self.kind:
            tensor = self._quantized(tensor)
        super().load_columns(name, tensor, kept)

    def _quantized(self, weight: Tensor) -> Tensor:
        """The values of a weight [out, in], whose scales are kept."""
        tensor, scale = quantize_rows(weight, self.kind)
        if not (scale.isfinite() & (scale > 0)).all():
            raise CheckpointError(
                f"{self.path} has output channels without a scale: all zeros, or not finite. "
                f"Leave it out with --ignored-layers {self.path}"
            )
        self.scale = nn.Parameter(scale, requires_grad=False)
        return tensor
