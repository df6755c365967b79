"""Features of any model. Each file edits seams (Linear, Attention, Stack) and exports one function,

    apply(module, config, context) -> None

`module` is a denoiser, `config` what the feature's rules give as its section (`feature_rules`). A feature knows no
model and no other feature; worker/edits.py alone says in which order they are applied. What a feature keeps of a
request is in the slots of that request's states.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed import ProcessGroup

from omni_grpc.loading.checkpoint import WeightTargets
from omni_grpc.nn.mesh import Mesh
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.ranks import Axis
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import ModelSpec

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Effects:
    """What features did to a model, for its worker to tell. It is one for all denoisers of a model.

    found: what goes into the worker's record, see `report`.
    warnings: warnings that belong to every reply.
    slots: what a feature keeps from one denoiser to the next, by the feature's name.
    checks: what a feature verifies once all denoisers are loaded, by the feature's name.
    on_sleep: frees what a feature holds on the device and makes anew when it is needed; called before the weights
    leave, while nothing runs.
    counts: what features count while the model runs, by name; each name has one writer.
    """

    found: WorkerFindings = dataclasses.field(default_factory=WorkerFindings)
    warnings: list[RequestWarning] = dataclasses.field(default_factory=list)
    slots: dict[str, Any] = dataclasses.field(default_factory=dict)
    checks: dict[str, Callable[[], None]] = dataclasses.field(default_factory=dict)
    on_sleep: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def report(self, **findings: Any) -> None:
        """Replaces these fields of `found`."""
        self.found = dataclasses.replace(self.found, **findings)

    def count_quantized(self, layers: Mapping[str, int], kept: int = 0) -> None:
        """Adds layers by quantization scheme, and layers of the blocks that stay in full precision."""
        counts = collections.Counter(self.found.quantized_layers) + collections.Counter(layers)
        self.report(quantized_layers=dict(counts), kept_layers=self.found.kept_layers + kept)

    def warn(self, warning: RequestWarning) -> None:
        """Adds a warning, once for all denoisers."""
        if warning not in self.warnings:
            logger.warning("%s", warning.message)
            self.warnings.append(warning)

    def check(self) -> None:
        """Runs every feature's check, once all denoisers are loaded. Raises what they raise (ConfigError)."""
        for check in self.checks.values():
            check()


@contextlib.contextmanager
def single_threaded() -> Iterator[bool]:
    """`Context.exclusive` of a process with one thread."""
    yield True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a feature is told about the denoiser that it edits.

    component, spec: which component of which model it is. device, dtype: of its weights.
    ranks: the ranks that it is spread over, see nn/mesh.py; None: there is one.
    places: where the checkpoint's weights go, by their names in the checkpoint.
    batch_invariant: whether a request has to give the same bits in any batch.
    effects: what features report, shared by all denoisers of the model.
    exclusive: a context manager in which no other thread of the worker uses the device. It yields False where that
    cannot be had now.
    """

    component: str
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    ranks: Mesh | None = None
    places: WeightTargets = dataclasses.field(default_factory=dict)
    batch_invariant: bool = False
    effects: Effects = dataclasses.field(default_factory=Effects)
    exclusive: Callable[[], AbstractContextManager[bool]] = single_threaded

    def group(self, axis: Axis, what: str) -> ProcessGroup:
        """The ranks of an axis. Raises ConfigError where this rank is alone: `what` needs others."""
        if self.ranks is None:
            raise ConfigError(f"{what}, and there is one")
        return self.ranks.of(axis, what)
