"""LoRA (https://arxiv.org/abs/2106.09685): y = W x + the sum of scale * up (down x), adapters and scales per row."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.config import LoraConfig
from omni_grpc.features import Context, Effects
from omni_grpc.loading.adapters import AdapterFile, Factors, read_adapter, refused
from omni_grpc.loading.checkpoint import WeightTarget
from omni_grpc.nn.linear import AnyLinear, Shard, active
from omni_grpc.nn.rows import Owner
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.lora import Adapter, Lora

logger = logging.getLogger(__name__)


def apply(module: nn.Module, config: LoraConfig, context: Context) -> None:
    """Wraps the linear layers that the adapters of the setting `lora` change. A request names the adapters that it
    wants.

    Raises ConfigError for an adapter that cannot be read or whose shapes do not fit.
    """
    for name, path in (config.lora or {}).items():
        file = read_adapter(name, Path(path))
        used: set[str] = set()
        for layer, factors in file.of(context.component, frozenset(context.spec.weights)).items():
            place = context.places.get(layer)
            if place is not None and isinstance(module.get_submodule(place.path), AnyLinear):
                _wrap_layer(module, place.path, context).add(name, layer, factors, place, context)
                used.update(factors.keys)
        _report(name, file, used, context)
    context.effects.checks["lora"] = functools.partial(_check_applied, context.effects)


def _wrap_layer(module: nn.Module, path: str, context: Context) -> LoraLinear:
    """The wrapper of a layer; the layer is wrapped if it was not before."""
    linear = module.get_submodule(path)
    assert isinstance(linear, AnyLinear)
    within = next((name for name, child in linear.named_children() if isinstance(child, AnyLinear)), "")
    if linear.shard is not None and within:
        # a rank changes what it has, before the ranks sum
        path, shard, linear = f"{path}.{within}", linear.shard, linear.get_submodule(within)
        assert isinstance(linear, AnyLinear)
    else:
        shard = None
    if isinstance(linear, LoraLinear):
        return linear
    owner, _, leaf = path.rpartition(".")
    wrapper = LoraLinear(linear, context.component, apart=context.batch_invariant, shard=shard)
    setattr(module.get_submodule(owner), leaf, wrapper)
    return wrapper


def _check_applied(effects: Effects) -> None:
    """Raises ConfigError for an adapter that fits no layer of any denoiser."""
    for adapter in effects.found.loras:
        if not adapter.keys_applied:
            first = ", ".join(adapter.skipped[:4])
            message = f"--lora {adapter.id}: no key of {adapter.file} fits a layer of the model; it has {first}"
            raise ConfigError(message, reason="BAD_LORA", violations=(Violation("lora", message),))


def _report(name: str, file: AdapterFile, used: set[str], context: Context) -> None:
    """Reports what an adapter did to one denoiser, together with what it did to those before."""
    loras = {adapter.id: adapter for adapter in context.effects.found.loras}
    before = loras.get(name)
    skipped = tuple(key for key in (file.keys if before is None else before.skipped) if key not in used)
    logger.info("adapter %s: %d keys fit %s, %d fit nothing so far", name, len(used), context.component, len(skipped))
    loras[name] = Adapter(
        id=name,
        file=file.path.name,
        sha256=file.sha256,
        format=file.format,
        rank=file.rank,
        size_bytes=file.size_bytes,
        applied={**(before.applied if before else {}), context.component: len(used)},
        skipped=skipped,
    )
    context.effects.report(loras=tuple(loras.values()))


@dataclasses.dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """The change that an adapter makes to some rows of a layer's weight: up [rows, r] @ down [r, in], with alpha / r
    folded into `up`.
    """

    down: Tensor
    up: Tensor
    rows: slice


class LoraLinear(AnyLinear):
    """Adds to each row the change of its request's adapters. `parts` holds the adapters of the layer, by name. With
    `apart`, rows are computed one by one even where they have the same adapters.
    """

    def __init__(self, base: AnyLinear, component: str, *, apart: bool = False, shard: Shard | None = None) -> None:
        super().__init__()
        self.shard = shard
        self.base, self.component, self.apart = base, component, apart
        self.in_features, self.out_features, self.stream = base.in_features, base.out_features, base.stream
        self.parts: dict[str, list[LowRankUpdate]] = {}

    @property
    def variant(self) -> Callable[[Owner], tuple[Lora, ...]]:
        return _loras

    @property
    def weight(self) -> Tensor:
        """The weight of the layer inside: models ask their layers for dtype and device."""
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        return weight

    def add(self, name: str, layer: str, factors: Factors, place: WeightTarget, context: Context) -> None:
        """Adds an adapter's change of `layer`, or this rank's part of it: the rows of `up` that make its outputs, the
        columns of `down` that read its inputs. Raises ConfigError where the shapes are not those of the checkpoint's
        weight.
        """
        outputs, inputs = (self.out_features, self.in_features) if self.shard is None else self.shard.shape
        rows = place.rows or slice(0, outputs)
        wanted, found = (rows.stop - rows.start, inputs), (factors.up.shape[0], factors.down.shape[1])
        if found != wanted:
            raise refused(name, f"{layer} changes a weight {found}, the model's is {wanted}")
        kept = context.spec.weights[context.component].in_float32(f"{place.path}.weight")
        dtype = torch.float32 if kept else context.dtype
        down, up = (x.to(context.device, dtype) for x in (factors.down, factors.up * factors.scale))
        if self.shard is not None and self.shard.inputs is not None:
            down = torch.cat([down[:, kept] for kept in self.shard.inputs], 1)
        for mine, theirs in _common(rows, None if self.shard is None else self.shard.outputs):
            self.parts.setdefault(name, []).append(LowRankUpdate(down, up[theirs], mine))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]: the wrapped layer, plus the low-rank updates of each row's adapters."""
        y: Tensor = self.base(x)
        for tokens, loras in self._adapter_runs():
            for lora in loras:
                if lora.scale and lora.target in ("", self.component):
                    for part in self.parts.get(lora.lora_id, ()):
                        change = F.linear(F.linear(x[tokens], part.down), part.up)
                        y[tokens, part.rows].add_(change, alpha=lora.scale)
        return y

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.base.shapes()

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Passes weight [out, in] or bias [out] on to the wrapped layer."""
        self.base.load_tensor(name, tensor)

    def _adapter_runs(self) -> Iterator[tuple[slice, tuple[Lora, ...]]]:
        """Runs of adjacent rows with the same adapters, each as a slice of the layer's tokens. A batch of one row gets
        all tokens, however many: ahead of the steps, the tokens of "mod" are those of all steps.
        """
        rows = active.get()
        if len(rows) == 1:
            yield slice(None), _loras(rows.owners[0])
            return
        offsets = rows.stream(self.stream).offsets
        of = [_loras(owner) for owner in rows.owners]
        for (loras, _), run in itertools.groupby(range(len(rows)), key=lambda row: (of[row], self.apart and row)):
            numbers = list(run)
            yield slice(offsets[numbers[0]], offsets[numbers[-1] + 1]), loras


def _common(rows: slice, kept: Sequence[slice] | None) -> Iterator[tuple[slice, slice]]:
    """Of some rows of a weight, those that a rank has: where they are in its part, and which of `rows` they are."""
    if kept is None:
        yield rows, slice(0, rows.stop - rows.start)
        return
    at = 0
    for part in kept:
        start, stop = max(rows.start, part.start), min(rows.stop, part.stop)
        if start < stop:
            shift = at - part.start
            yield slice(start + shift, stop + shift), slice(start - rows.start, stop - rows.start)
        at += part.stop - part.start


def _loras(owner: Owner) -> tuple[Lora, ...]:
    loras: tuple[Lora, ...] = owner[0].request.loras
    return loras
