"""What the model of this server is and accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from omni_grpc.config import LimitsConfig
from omni_grpc.engine import Engine, EngineState
from omni_grpc.gate.audit import Audit
from omni_grpc.gate.quotas import Quotas
from omni_grpc.gate.stored import Stored
from omni_grpc.resolve.request import check_model
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import Failure
from omni_grpc.types.lora import Adapter
from omni_grpc.types.plan import Ready
from omni_grpc.types.request import Task
from omni_grpc.types.spec import Checkpoint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model at this moment. `ready` is None until it is loaded; `failure` says why it is not there."""

    checkpoint: Checkpoint
    state: EngineState
    ready: Ready | None
    failure: Failure | None
    facts: ServingFacts
    limits: LimitsConfig


class ModelGate:
    """Every function raises PermissionDenied for a missing scope."""

    def __init__(self, engine: Engine, stored: Stored, quotas: Quotas, audit: Audit) -> None:
        self._engine = engine
        self._audit = audit
        self._stored = stored
        self._quotas = quotas

    def served(self, caller: Caller, tasks: Collection[Task] = ()) -> list[ModelView]:
        """The models that have one of these tasks; without tasks, all."""
        with self._audit.refusals(caller, "ListModels"):
            caller.require(*Scope)
        fits = not tasks or not set(tasks).isdisjoint(self._engine.checkpoint.tasks)
        return [self.view()] if fits and self._quotas.sees(caller, self._engine.checkpoint.name) else []

    def get(self, caller: Caller, name: str) -> ModelView:
        """The model of this name; the only one for an empty name. Raises NotFound for one that is not served."""
        with self._audit.refusals(caller, "GetModel", model=name):
            caller.require(*Scope)
            self.check_name(caller, name)
        return self.view()

    def loras(self, caller: Caller, model: str = "") -> list[tuple[Adapter, str, int]]:
        """The LoRA adapters that are loaded by id, each with its model, and in how many of the caller's jobs that have
        not ended it is in use.
        """
        with self._audit.refusals(caller, "ListLoras", model=model):
            caller.require(*Scope)
            self.check_name(caller, model)
        running = [job.request.loras for job in self._stored.jobs(caller) if not job.state.terminal]
        return [
            (
                adapter,
                self._engine.checkpoint.name,
                sum(any(lora.lora_id == adapter.id for lora in loras) for loras in running),
            )
            for adapter in sorted(self._engine.facts.found.loras, key=lambda adapter: adapter.id)
        ]

    def check_name(self, caller: Caller, name: str) -> None:
        """Raises NotFound for a model that is not served, PermissionDenied for one that is not for the caller.

        An empty name means the model that is served.
        """
        check_model(name, self._engine.checkpoint)
        self._quotas.require_model(caller, self._engine.checkpoint.name)

    def view(self) -> ModelView:
        engine = self._engine
        return ModelView(
            checkpoint=engine.checkpoint,
            state=engine.state,
            ready=engine.ready,
            failure=engine.failure,
            facts=engine.facts,
            limits=engine.config.limits,
        )
