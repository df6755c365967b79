"""The spec of a pipeline that is not native: any diffusers pipeline, driven from outside through its scheduler.

What such a pipeline can do is known only when it is loaded. The worker finds out and reports a checkpoint whose configs
hold the answer under SESSION, as the fields of Limits and Defaults; until then there is nothing to ask for.
"""

from __future__ import annotations

import dataclasses

from omni_grpc.types.request import Guidance, GuidanceNorm
from omni_grpc.types.spec import Configs, Defaults, Limits, ModelSpec, PromptScale

SESSION = "session"
"""Key in Checkpoint.configs: {"limits": fields of Limits, "defaults": fields of Defaults}."""

OPAQUE_FAMILY = "diffusers"


def opaque_spec(pipeline: str) -> ModelSpec:
    """`pipeline` is the class that model_index.json names. What it can do follows with the worker's report."""
    return ModelSpec(
        name=pipeline,
        family=OPAQUE_FAMILY,
        tasks=(),
        pipeline="",
        guidance=(),
        limits=limits,
        defaults=defaults,
        runner="omni_grpc.adapter.runner:SessionRunner",
        exclusive=True,
    )


def nameless_spec() -> ModelSpec:
    """The spec of a model that is not downloaded yet: not even its pipeline class is known."""
    return dataclasses.replace(opaque_spec(""), family="", runner="", exclusive=False)


def limits(configs: Configs) -> Limits:
    return Limits(**configs[SESSION]["limits"])


def defaults(configs: Configs) -> Defaults:
    values = dict(configs[SESSION]["defaults"])
    guidance = dict(values.pop("guidance", {}))
    if "norm" in guidance:
        guidance["norm"] = GuidanceNorm(guidance["norm"])
    if "prompt_scale" in values:
        values["prompt_scale"] = PromptScale(**values["prompt_scale"])
    return Defaults(**values, guidance=Guidance(**guidance))
