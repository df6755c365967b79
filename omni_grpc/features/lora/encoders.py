"""Adapters of text encoders: their linear layers are wrapped as those of denoisers are. While a prompt is encoded, a
row of its request is active, so each prompt gets the adapters of its own request.
"""

from __future__ import annotations

import dataclasses
import re

from torch import nn

from omni_grpc.config import LoraConfig
from omni_grpc.features import Context
from omni_grpc.features.lora import attach
from omni_grpc.loading.checkpoint import WeightTarget
from omni_grpc.nn.foreign import PackedInside
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.pipeline.text_encoders import PROMPT, TextEncoder
from omni_grpc.types.spec import WeightMap

PACKED = "packed"
"""Where `PackedInside` has the layer that is wrapped."""


def apply(pipeline: Pipeline, config: LoraConfig, context: Context) -> None:
    """Wraps the linear layers of the text encoders of a pipeline that adapters change.

    Raises ConfigError for an adapter that does not fit, as features/lora/attach.py does.
    """
    for component, encoder in encoders(pipeline).items():
        attach.apply(encoder, config, encoder_context(component, encoder, context))


def encoders(pipeline: nn.Module) -> dict[str, nn.Module]:
    """The language models of a pipeline's text encoders, by component."""
    return {name: child.encoder for name, child in pipeline.named_children() if isinstance(child, TextEncoder)}


def encoder_context(component: str, encoder: nn.Module, context: Context) -> Context:
    """Makes the linear layers of an encoder layers of ours, and returns what features are told of it: its weights by
    the names that its library has for them, each in the precision that it is kept in.
    """
    places: dict[str, WeightTarget] = {}
    float32: list[str] = []
    for path, part in list(encoder.named_modules()):
        if isinstance(part, nn.Linear):
            parent, _, leaf = path.rpartition(".")
            setattr(encoder.get_submodule(parent), leaf, PackedInside(part, stream=PROMPT))
            places[path] = WeightTarget(f"{path}.{PACKED}")
            if part.weight.dtype.itemsize == 4 and part.weight.is_floating_point():
                float32.append(rf"^{re.escape(path)}\.{PACKED}\.weight$")
        elif isinstance(getattr(part, "weight", None), nn.Parameter):
            places[path] = WeightTarget(path)
    spec = dataclasses.replace(context.spec, weights={component: WeightMap(float32=tuple(float32))})
    return dataclasses.replace(context, component=component, spec=spec, places=places)
