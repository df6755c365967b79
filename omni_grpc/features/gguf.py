"""GGUF: weights stay packed as the file has them, and are dequantized layer by layer when they are used."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from omni_grpc.config import QuantizationConfig
from omni_grpc.features import Context
from omni_grpc.loading.checkpoint import WeightTarget
from omni_grpc.nn.linear import AnyLinear, Elsewhere, Linear
from omni_grpc.nn.packed_linear import PackedLinear, Workspace
from omni_grpc.ops.dequant import Packing
from omni_grpc.types.errors import ConfigError, Violation

logger = logging.getLogger(__name__)


def apply(module: nn.Module, config: QuantizationConfig, context: Context) -> None:
    """Replaces every linear layer that the file has in fewer bits than the model's dtype, before it gets its weight.

    Raises ConfigError where there is no such layer, and by name for a layer that is sharded over ranks.
    """
    workspace, done, left = Workspace(context.device), 0, []
    parts: dict[str, list[WeightTarget]] = {}
    for place in context.places.values():
        parts.setdefault(place.path, []).append(place)
    for path, places in parts.items():
        linear = module.get_submodule(path)
        if not isinstance(linear, AnyLinear) or isinstance(linear, Elsewhere):
            continue
        runs = _runs(places, linear.out_features)
        kind = "+".join(dict.fromkeys(packing.name for packing, _ in runs))
        fits = all(linear.in_features % packing.elements == 0 for packing, _ in runs)
        if not fits or sum(_bits(packing) * rows for packing, rows in runs) >= (
            8 * context.dtype.itemsize * linear.out_features
        ):
            left.append(f"{path} ({kind})")
            continue
        if type(linear) is not Linear:
            why = (
                f"{context.component}.{path} is spread over several ranks, and its share of a row would cut blocks of "
                f"{kind}; serve the file on one rank"
            )
            raise ConfigError(why, reason="NOT_SUPPORTED", violations=(Violation("gguf_model", why),))
        owner, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(owner), leaf, PackedLinear(linear, runs, context.dtype, workspace))
        context.effects.count_quantized({f"gguf {kind}": 1})
        done += 1
    if not done:
        why = (
            f"--gguf-model has no layer of {context.component} in fewer bits than {context.dtype}; leave out "
            "--quantization gguf and serve the checkpoint's own weights, or pass a file of fewer bits"
        )
        raise ConfigError(why, reason="NOTHING_QUANTIZED", violations=(Violation("gguf_model", why),))
    unpacked = f", {len(left)} are unpacked: {', '.join(left)}" if left else ""
    logger.info("%s: %d layers stay packed as in the GGUF file%s", context.component, done, unpacked)


def _bits(packing: Packing) -> float:
    return 8 * packing.size / packing.elements


def _runs(places: Iterable[WeightTarget], rows: int) -> list[tuple[Packing, int]]:
    """Runs of adjacent rows with the same packing, as (packing, number of rows)."""
    runs: list[tuple[Packing, int]] = []
    for place in sorted(places, key=lambda place: place.rows.start if place.rows else 0):
        assert place.packing is not None, "weights of a file that has none packed"
        count = place.rows.stop - place.rows.start if place.rows else rows
        if runs and runs[-1][0] == place.packing:
            count += runs.pop()[1]
        runs.append((place.packing, count))
    return runs
