"""The tensors of a checkpoint as its headers name them, and weights that it stores in 8 bits, with scales beside them.

Layouts: compressed-tensors (https://github.com/vllm-project/compressed-tensors: float8 and int8 with a scale for each
tensor or output channel) and ModelOpt (https://github.com/NVIDIA/TensorRT-Model-Optimizer: FP8 with a scale for each
tensor). Both keep `X.weight` as codes and `X.weight_scale` beside it; a weight is codes * scale. They may have
`X.input_scale`, for activations of one scale that was measured once: here every token gets a scale of its own as it
comes, which is finer, so those are not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.json_text import read_json

CODES: Mapping[str, torch.dtype] = MappingProxyType({"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8})
"""Dtypes of codes, by their names in a safetensors header."""

WEIGHT_SCALE, INPUT_SCALE = "weight_scale", "input_scale"
MODELOPT_CONFIG = "hf_quant_config.json"
"""Where ModelOpt says what it did, if it is not in the component's config."""

FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
"""Of compressed-tensors: those that keep one code in each byte."""

STRATEGIES = ("tensor", "channel")
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
"""Of ModelOpt."""

SERVED = "compressed-tensors in float8 or int8 with scales by tensor or channel, and ModelOpt FP8"


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the checkpoint, and which rows of a parameter it fills (all of them where `rows` is None). `codes`
    is its dtype where it is a weight in 8 bits; then it has a `scale`.
    """

    key: str
    file: Path
    shape: tuple[int, ...]
    rows: slice | None = None
    codes: torch.dtype | None = None
    scale: Source | None = None


def paired(found: Iterable[Source], folder: Path) -> list[Source]:
    """All tensors but scales, weights in 8 bits with theirs.

    Raises CheckpointError, with all their names, for weights without a scale and for scales of other shapes than one
    for the tensor or one for each row.
    """
    by_key = {source.key: source for source in found}
    left, without, misshapen = [], [], []
    for key, source in by_key.items():
        module, _, leaf = key.rpartition(".")
        if leaf in (WEIGHT_SCALE, INPUT_SCALE):
            weight = by_key.get(f"{module}.weight")
            if weight is not None and weight.codes is not None:
                continue
        if source.codes is None:
            left.append(source)
            continue
        scale = by_key.get(f"{module}.{WEIGHT_SCALE}")
        if leaf != "weight" or scale is None:
            without.append(key)
        elif _count(scale.shape) not in (1, source.shape[0]):
            misshapen.append(f"{scale.key} {scale.shape} for a weight {source.shape}")
        else:
            left.append(dataclasses.replace(source, scale=scale))
    if without:
        raise CheckpointError(
            f"the weights in {folder} are in 8 bits and lack a scale ({WEIGHT_SCALE}): {', '.join(without)}"
        )
    if misshapen:
        raise CheckpointError(
            f"the weights in {folder} have scales in blocks or groups, which are not served: {', '.join(misshapen)}; "
            f"served: {SERVED}"
        )
    return left


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def stored_as(sources: Sequence[Source]) -> torch.dtype | None:
    """The dtype of the codes of a parameter that these fill; None where some part has full precision or another one."""
    kinds = {source.codes for source in sources}
    return kinds.pop() if len(kinds) == 1 else None


def scales(source: Source, handles: Mapping[Path, Any]) -> Tensor:
    """The scale of each row of a weight in 8 bits, float32 [rows].

    Raises CheckpointError for one that is zero, negative or not finite: its weights would be zero or NaN.
    """
    assert source.scale is not None
    read: Tensor = handles[source.scale.file].get_tensor(source.scale.key).float().flatten()
    wrong = int((~(read.isfinite() & (read > 0))).sum())
    if wrong:
        raise CheckpointError(
            f"{source.scale.key} is zero, negative or not finite in {wrong} of {read.numel()} places; "
            "quantize the checkpoint again"
        )
    return read.expand(source.shape[0])


def codes(source: Source, handles: Mapping[Path, Any]) -> Tensor:
    """A weight's codes. Raises CheckpointError for float8 with a NaN in it."""
    read: Tensor = handles[source.file].get_tensor(source.key)
    if source.codes == torch.float8_e4m3fn and bool(((read.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise CheckpointError(f"{source.key} has values that are NaN; quantize the checkpoint again")
    return read


def value(source: Source, handles: Mapping[Path, Any]) -> Tensor:
    """A tensor of the checkpoint as numbers: codes * scale in float32, any other tensor as it is."""
    if source.codes is None:
        read: Tensor = handles[source.file].get_tensor(source.key)
        return read
    rows = codes(source, handles).float().flatten(1)
    return (rows * scales(source, handles)[:, None]).view(source.shape)


# --- what a config says -----------------------------------------------------------------------------------------------


def check_scheme(config: Mapping[str, Any], folder: Path) -> None:
    """Raises CheckpointError for a component whose config declares a quantization that is not supported."""
    declared = config.get("quantization_config")
    if declared is None and (folder / MODELOPT_CONFIG).is_file():
        try:
            content = read_json((folder / MODELOPT_CONFIG).read_text(encoding="utf-8"))
            declared = {"quant_method": "modelopt", **content["quantization"]}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / MODELOPT_CONFIG} cannot be read: {error!r}") from error
    if declared is None:
        return
    if problem := _problem(declared):
        raise CheckpointError(
            f"{folder} is quantized: {problem}, which is not served. Served: {SERVED}; others may run through "
            "diffusers, --diffusion-load-format diffusers",
            reason="QUANTIZATION_NOT_SUPPORTED",
        )


def _problem(declared: Any) -> str:
    """What is not supported about it; empty if everything is."""
    if not isinstance(declared, Mapping):
        return f"quantization_config is {declared!r}"
    method = declared.get("quant_method")
    if method == "modelopt":
        algorithm = declared.get("quant_algo")
        return "" if algorithm in ALGORITHMS else f"quant_method modelopt, quant_algo {algorithm}"
    if method != "compressed-tensors":
        return f"quant_method {method}"
    if (layout := declared.get("format")) not in FORMATS:
        return f"quant_method compressed-tensors, format {layout}"
    groups = declared.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "quant_method compressed-tensors without config_groups"
    return next((problem for group in groups.values() if (problem := _of_group(group))), "")


def _of_group(group: Mapping[str, Any]) -> str:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if inputs is None:
        return "compressed-tensors with weights alone in 8 bits"
    for name, part in (("weights", weights), ("input_activations", inputs)):
        if part.get("num_bits") != 8 or part.get("type") not in ("float", "int"):
            return f"compressed-tensors, {name} of {part.get('num_bits')} bits, type {part.get('type')}"
        if not part.get("symmetric", True):
            return f"compressed-tensors, {name} that are not symmetric"
    if weights["type"] != inputs["type"]:
        return f"compressed-tensors, weights of type {weights['type']} with activations of type {inputs['type']}"
    if weights.get("strategy") not in STRATEGIES:
        return f"compressed-tensors, weights with scales by {weights.get('strategy')}"
    if inputs.get("strategy") not in ("tensor", "token"):
        return f"compressed-tensors, input_activations with scales by {inputs.get('strategy')}"
    return ""
