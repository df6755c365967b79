"""What can be added to any model: each file edits seams (Linear, Attention, Stack) and exports one function,

    apply(module, config, context) -> None

`module` is a denoiser, `config` the feature's own section of the configuration. A feature knows no model and no other
feature; worker/edits.py alone says in which order they are applied. What a feature keeps of a request is in the slots
of that request's states.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch.distributed import ProcessGroup

from omni_grpc.config.roles import Roles
from omni_grpc.loading.checkpoint import WeightTargets
from omni_grpc.types.adapters_and_caches import Adapter
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import ModelSpec

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Effects:
    """What features did to a model, for its worker to tell: layers by quantisation scheme, how many of the same kind
    stayed as they are, adapters by id, warnings that belong to every reply, and where backends were chosen by role
    those of each, with the categories of the roles.
    """

    quantized_layers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    kept_layers: int = 0
    warnings: list[RequestWarning] = dataclasses.field(default_factory=list)
    loras: dict[str, Adapter] = dataclasses.field(default_factory=dict)
    attention: dict[str, dict[str, None]] = dataclasses.field(default_factory=dict)
    categories: set[str] = dataclasses.field(default_factory=set)
    asked: Roles = dataclasses.field(default_factory=Roles)

    def warn(self, warning: RequestWarning) -> None:
        """Once for all denoisers."""
        if warning not in self.warnings:
            logger.warning("%s", warning.message)
            self.warnings.append(warning)

    def check(self) -> None:
        """Raises ConfigError for an adapter that changes nothing, and for a role that nothing has, once all denoisers
        are loaded.
        """
        self.asked.check(self.attention.keys() | self.categories)
        for adapter in self.loras.values():
            if not adapter.keys_applied:
                first = ", ".join(adapter.skipped[:4])
                message = f"--lora {adapter.id}: no key of {adapter.file} fits a layer of the model; it has {first}"
                raise ConfigError(message, reason="BAD_LORA", violations=(Violation("lora", message),))


@contextlib.contextmanager
def undisturbed() -> Iterator[bool]:
    """`Context.alone` where there is one thread."""
    yield True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a feature is told about the denoiser that it edits: which component of which model it is, where its weights
    live, the ranks it is spread over (None: there is one), where the checkpoint's weights go, and whether a row is to
    give the same in any batch. `effects` is the same for all denoisers of a model; a feature adds to it. In `alone` no
    other thread of the worker is at work on the device; it gives False where it cannot be had now.
    """

    component: str
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    ranks: ProcessGroup | None = None
    places: WeightTargets = dataclasses.field(default_factory=dict)
    batch_invariant: bool = False
    effects: Effects = dataclasses.field(default_factory=Effects)
    alone: Callable[[], AbstractContextManager[bool]] = undisturbed
