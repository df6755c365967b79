"""LoRA in the components of a model: the adapters of its settings at once, others while it runs."""

from __future__ import annotations

from torch import nn

from omni_grpc.config import LoraConfig
from omni_grpc.features import Context
from omni_grpc.features.lora.adapters import Adapters
from omni_grpc.features.lora.layer import AdapterKeys
from omni_grpc.features.lora.site import Site
from omni_grpc.nn.stack import Stack

NAME = "lora"


def apply(module: nn.Module, config: LoraConfig, context: Context) -> None:
    """Wraps the linear layers that the adapters of the setting `lora` change. A request names the adapters that it
    wants. Others may be loaded later, and wrap the layers that they change then: layers that no adapter changes cost
    what they cost without the feature.

    Raises ConfigError for an adapter that cannot be read, whose shapes do not fit, or that has changes of a kind that
    cannot be made row by row.
    """
    effects = context.effects
    adapters = effects.adapters
    if adapters is None:
        adapters = effects.adapters = Adapters(config, context)
        effects.checks[NAME] = adapters.settle
        effects.on_sleep.append(adapters.sleep)
    assert isinstance(adapters, Adapters)
    for stack in [part for part in module.modules() if isinstance(part, Stack)]:
        # from the start, batches and tables are told apart by what any layer may look at later
        stack.add_module(AdapterKeys.NAME, AdapterKeys())
    adapters.add(Site(module, context, adapters.copies))
