"""One pipeline class and what is known about it: the class that was loaded, or a sibling over its weights."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from diffusers import DiffusionPipeline

from omni_grpc.adapter import caches
from omni_grpc.adapter.abilities import Ability, ability
from omni_grpc.adapter.describe import describe
from omni_grpc.adapter.guiders import has_scale
from omni_grpc.adapter.parameters import Signature, check_call_kwargs
from omni_grpc.adapter.preview import Previews
from omni_grpc.adapter.siblings import siblings
from omni_grpc.types.errors import CheckpointError, ConfigError
from omni_grpc.types.request import Task
from omni_grpc.types.spec import Checkpoint

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """`call_kwargs` are those of the settings that this class takes."""

    pipeline: DiffusionPipeline
    able: Ability
    signature: Signature
    call_kwargs: Mapping[str, Any]
    previews: Previews

    @property
    def name(self) -> str:
        return self.signature.pipeline


def members(
    pipeline: DiffusionPipeline, checkpoint: Checkpoint, call_kwargs: Mapping[str, Any], cache: caches.Cache | None
) -> tuple[list[Member], Checkpoint]:
    """The pipeline and its siblings, and the checkpoint with what they can do.

    Raises CheckpointError for a class that cannot be served, ConfigError for call_kwargs that none takes.
    """
    able = ability(type(pipeline))
    if able.reason:
        message = f"{type(pipeline).__name__} cannot be served: it {able.reason}"
        raise CheckpointError(message, reason="MODEL_NOT_SUPPORTED")
    others, refusals = siblings(pipeline)
    found = [_member(pipeline, call_kwargs)]
    for other in others:
        member = _member(other, call_kwargs)
        if reason := _cache_refuses(cache, other):
            refusals |= dict.fromkeys(member.able.tasks, reason)
        else:
            found.append(member)
            logger.info("%s does %s", member.name, ", ".join(member.able.tasks))
    check_call_kwargs([member.signature for member in found], call_kwargs)
    return found, _described(found, refusals, checkpoint)


def _member(pipeline: DiffusionPipeline, call_kwargs: Mapping[str, Any]) -> Member:
    guided = has_scale(pipeline)
    signature = Signature(type(pipeline), guided=guided)
    return Member(
        pipeline=pipeline,
        able=ability(type(pipeline), guided=guided),
        signature=signature,
        call_kwargs={name: value for name, value in call_kwargs.items() if not signature.unknown(name)},
        previews=Previews(pipeline),
    )


def _cache_refuses(cache: caches.Cache | None, pipeline: DiffusionPipeline) -> str:
    try:
        if cache is not None:
            cache.check(pipeline)
    except ConfigError as error:
        return str(error)
    return ""


def _described(found: Sequence[Member], refusals: Mapping[Task, str], checkpoint: Checkpoint) -> Checkpoint:
    own, *others = (describe(one.pipeline, one.able, one.signature, checkpoint, one.call_kwargs) for one in found)
    siblings = tuple(
        dataclasses.replace(other, spec=dataclasses.replace(other.spec, name=one.name))
        for other, one in zip(others, found[1:], strict=True)
    )
    return dataclasses.replace(own, siblings=siblings, refusals=refusals)
