"""What ranks are asked to do with models. With no group, the same in one process."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from omni_grpc.features.quant import QuantizedLinear
from omni_grpc.loading.checkpoint import WeightTargets
from omni_grpc.loading.loader import Edit, Loader
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.plan import RequestStep
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Checkpoint
from omni_grpc.worker.packed import PackedRunner
from tests.parallel.jobs import FEATURES, Group, Work, context, device_of, watched

Features = Mapping[str, Any]
"""Names of features, and for each its section of the configuration."""


def load(group: Group, checkpoint: Checkpoint, features: Features) -> Pipeline:
    def edits(before: bool) -> list[Edit]:
        chosen = [name for name, feature in FEATURES.items() if name in features and feature.before == before]
        return [functools.partial(edit, name) for name in chosen]

    def edit(feature: str, module: nn.Module, component: str, places: WeightTargets) -> None:
        told = dataclasses.replace(context(group, checkpoint.spec, component), places=places)
        FEATURES[feature].apply(module, features[feature], told)

    module, _, name = checkpoint.spec.pipeline.partition(":")
    kind: type[Pipeline] = getattr(importlib.import_module(module), name)
    return kind.load(
        Loader(
            checkpoint=checkpoint,
            device=device_of(group),
            dtype=torch.float32,
            before=edits(True),
            after=edits(False),
        )
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """The latents of each request, what they took, how often a cache answered for rows of each, what it measured (the
    sum of the changes, and their number), and the weights of all components.
    """

    latents: dict[str, Tensor]
    work: Work
    reused: dict[str, int]
    change: float
    measured: int
    weights: int


def refused(group: Group, checkpoint: Checkpoint, features: Features) -> str:
    """What is said to features that do not go together."""
    try:
        load(group, checkpoint, features)
    except ConfigError as error:
        return str(error)
    return ""


def quantized_layers(group: Group, checkpoint: Checkpoint, features: Features) -> set[str]:
    """The layers in 8 bits, by the names that they have without what is around them."""
    return {
        name.removesuffix(".inner")
        for name, module in load(group, checkpoint, features).named_modules()
        if isinstance(module, QuantizedLinear)
    }


def run_model(group: Group, checkpoint: Checkpoint, features: Features, joins: Sequence[tuple[int, Request]]) -> Made:
    """Requests, each with the tick at which it joins."""
    pipeline = load(group, checkpoint, features)
    runner = PackedRunner(pipeline, device_of(group), "omni-test-ranks-")
    running: list[str] = []
    steps: list[RequestStep] = []
    with watched() as work:
        for tick in itertools.count():
            for request in [request for at, request in joins if at == tick]:
                runner.prepare(request)
                running.append(request.id)
            report = runner.step(running)
            assert report.broken == ()
            steps += report.progress
            running = [progress.id for progress in report.progress if not progress.finished]
            if not running and tick >= max(at for at, _ in joins):
                break
    latents = {name: torch.stack([state.latents for state in held.states]).cpu() for name, held in runner._held.items()}
    counts = [count for step in steps for count in step.reports.cache]
    return Made(
        latents=latents,
        work=work,
        reused={name: sum(step.reports.rows_reused for step in steps if step.id == name) for name in latents},
        change=sum(count.change for count in counts),
        measured=sum(count.measured for count in counts),
        weights=sum(parameter.numel() for parameter in pipeline.parameters()),
    )
