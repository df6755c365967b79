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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from omni_grpc.loading.checkpoint import WeightTargets
from omni_grpc.nn.mesh import Mesh
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.lora import Adapter
from omni_grpc.types.plan import LoadAdapter
from omni_grpc.types.ranks import Axis
from omni_grpc.types.request import Request
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import ModelSpec
from omni_grpc.types.vitals import AdapterMemory

logger = logging.getLogger(__name__)


class Adapters(Protocol):
    """The adapters of a model that come and go while it runs, as a worker sees them. What `load` returns goes to
    `attach`, what `unload` and `release` return to `remove`.
    """

    def load(self, order: LoadAdapter) -> Any:
        """Reads, checks and converts an adapter, on a thread of its own. Raises OmniError."""

    def attach(self, entry: Any) -> Adapter:
        """Makes a loaded adapter one that requests may name. Called between steps, and quick."""

    def admit(self, request: Request) -> None:
        """Has the adapters of a request where they are needed, until it is released. Called before its prepare. Raises
        OmniError for an adapter that is not there, or finds no room.
        """

    def release(self, request_id: str) -> Sequence[Any]:
        """A request has ended. Returns the adapters that were to be unloaded and have no other request. Called between
        steps, and quick.
        """

    def unload(self, key: str) -> Any:
        """Admits no request with an adapter any more. Returns it where none has it, None where one still does. Raises
        KeyError where there is none of this key.
        """

    def remove(self, entry: Any) -> None:
        """Frees an adapter that no request has, on any thread."""

    def wake(self) -> None:
        """The device can be used again, after the sleep of which `Effects.on_sleep` has told."""

    @property
    def found(self) -> Sequence[Adapter]:
        """Those that requests may name, and those that are being unloaded."""

    @property
    def room(self) -> int:
        """Bytes of the device that they may still take."""

    @property
    def memory(self) -> Sequence[AdapterMemory]:
        """What they have of each memory that is bounded for them. Asked from any thread."""


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
    adapters: those that come and go while the model runs; None where the feature is off.
    stale: forgets what was made for requests and reads tensors that are gone; gets a function that says of what a
    part looks at in an owner (nn.rows.ByOwner) whether that is so.
    """

    found: WorkerFindings = dataclasses.field(default_factory=WorkerFindings)
    warnings: list[RequestWarning] = dataclasses.field(default_factory=list)
    slots: dict[str, Any] = dataclasses.field(default_factory=dict)
    checks: dict[str, Callable[[], None]] = dataclasses.field(default_factory=dict)
    on_sleep: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    adapters: Adapters | None = None
    stale: list[Callable[[Callable[[Hashable], bool]], None]] = dataclasses.field(default_factory=list)

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

    component, spec: which component of which model it is. denoisers: those that the model has, in order. device, dtype:
    of its weights.
    ranks: the ranks that it is spread over, see nn/mesh.py; None: there is one.
    places: where the checkpoint's weights go, by their names in the checkpoint.
    batch_invariant: whether a request has to give the same bits in any batch.
    effects: what features report, shared by all denoisers of the model.
    exclusive: a context manager in which no other thread of the worker uses the device. It yields False where that
    cannot be had now. work: one in which no other thread has it for itself.
    copied: a copy on the device of bytes of the host, uint8 [N], there when it returns; None: the device has no memory
    of its own.
    """

    component: str
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    ranks: Mesh | None = None
    denoisers: tuple[str, ...] = ()
    places: WeightTargets = dataclasses.field(default_factory=dict)
    batch_invariant: bool = False
    effects: Effects = dataclasses.field(default_factory=Effects)
    exclusive: Callable[[], AbstractContextManager[bool]] = single_threaded
    work: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    copied: Callable[[Tensor], Tensor] | None = None

    def group(self, axis: Axis, what: str) -> ProcessGroup:
        """The ranks of an axis. Raises ConfigError where this rank is alone: `what` needs others."""
        if self.ranks is None:
            raise ConfigError(f"{what}, and there is one")
        return self.ranks.of(axis, what)
