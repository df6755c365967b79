"""Runner: the interface between a worker and what carries out its requests."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from omni_grpc.config import EngineConfig
from omni_grpc.features import Adapters
from omni_grpc.nn.mesh import Mesh
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.memory_model import MemoryModel
from omni_grpc.types.plan import CostModel, Decoded, DecodedPart, Prepared, Stepped
from omni_grpc.types.request import Request
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import Checkpoint
from omni_grpc.worker.device_memory import DeviceMemory
from omni_grpc.worker.phases import Staging


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerContext:
    """Where and how a runner runs. `prefix` begins the name of every shared-memory block that it creates; `tell`
    receives the progress of loading. `staging` takes the components that are on the device only while they run, where
    there are any; `residency` says in words what leaves the device. `ranks` are those that the model is spread over,
    see nn/mesh.py. `memory` is that of the device; None where it has none of its own.
    """

    config: EngineConfig
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    prefix: str
    tell: Callable[[Loading], None]
    staging: Staging | None = None
    residency: str = ""
    ranks: Mesh | None = None
    memory: DeviceMemory | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A runner and what is reported of it, see plan.Ready. `components` are the parts of its model, by name.
    `denoising` are the methods (object, name) that make up a denoise step, where that is not `step` itself. `on_sleep`
    free what is made anew when it is needed, before the weights leave the device. `counts` is what features count while
    it runs, by name. `adapters` are those that come and go; None: the model takes none.
    """

    runner: Runner
    weight_bytes: int
    cost: CostModel = dataclasses.field(default_factory=CostModel)
    memory: MemoryModel = dataclasses.field(default_factory=MemoryModel)
    found: WorkerFindings = dataclasses.field(default_factory=WorkerFindings)
    warnings: tuple[RequestWarning, ...] = ()
    checkpoint: Checkpoint | None = None
    components: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    denoising: Sequence[tuple[Any, str]] = ()
    on_sleep: Sequence[Callable[[], None]] = ()
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    adapters: Adapters | None = None


class Runner(abc.ABC):
    """Holds the requests that are in the worker and advances them. Each of prepare, step and decode is called from a
    lane of its own; `drop` from any thread. An error that prepare or decode raises fails that request alone.
    """

    @classmethod
    @abc.abstractmethod
    def load(cls, setting: RunnerContext) -> LoadedModel:
        """Loads the model. Raises ConfigError or CheckpointError with the reason."""

    @abc.abstractmethod
    def prepare(self, request: Request) -> Prepared:
        """Everything before the first denoise step."""

    @abc.abstractmethod
    def step(self, ids: Sequence[str]) -> Stepped:
        """One denoise step of each of these requests; those dropped in the meantime are skipped."""

    @abc.abstractmethod
    def decode_part(self, request_id: str) -> DecodedPart:
        """Decodes the finished segments of a request that goes on stepping. Raises Cancelled for a request that was
        dropped.
        """

    @abc.abstractmethod
    def decode(self, request_id: str) -> Decoded:
        """The outputs as files in shared memory. Raises Cancelled for a request that was dropped."""

    @abc.abstractmethod
    def drop(self, ids: Sequence[str]) -> None:
        """Drops the state of these requests, whatever their phase."""
