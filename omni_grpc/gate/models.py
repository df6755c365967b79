"""What the models of this server are and accept."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from omni_grpc.config import LimitsConfig
from omni_grpc.engine import EngineState
from omni_grpc.fleet import Fleet, Served
from omni_grpc.gate.audit import Audit
from omni_grpc.gate.quotas import Quotas
from omni_grpc.gate.stored import Stored
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import Failure
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

    def __init__(self, fleet: Fleet, stored: Stored, quotas: Quotas, audit: Audit) -> None:
        self._fleet = fleet
        self._audit = audit
        self._stored = stored
        self._quotas = quotas

    def served(self, caller: Caller, tasks: Collection[Task] = ()) -> list[ModelView]:
        """The models that have one of these tasks; without tasks, all."""
        with self._audit.refusals(caller, "ListModels"):
            caller.require(*Scope)
        return [
            view(model) for model in self.seen(caller) if not tasks or not set(tasks).isdisjoint(model.checkpoint.tasks)
        ]

    def get(self, caller: Caller, name: str) -> ModelView:
        """The model of this name; the only one for an empty name. Raises NotFound for one that is not served."""
        with self._audit.refusals(caller, "GetModel", model=name):
            caller.require(*Scope)
            return view(self.named(caller, name))

    def named(self, caller: Caller, name: str) -> Served:
        """The model of a name. Raises NotFound for one that is not served, PermissionDenied for one that is not for the
        caller. An empty name means the only model.
        """
        model = self._fleet.model(name)
        self._quotas.require_model(caller, model.name)
        return model

    def seen(self, caller: Caller) -> list[Served]:
        """The models that exist for a caller."""
        return [model for model in self._fleet.models if self._quotas.sees(caller, model.name)]


def view(model: Served) -> ModelView:
    """A model as it is now."""
    engine = model.engine
    return ModelView(
        checkpoint=model.checkpoint,
        state=model.state,
        ready=model.ready,
        failure=model.failure if engine is None else engine.failure or model.failure,
        facts=model.facts,
        limits=model.config.limits,
    )
