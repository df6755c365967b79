"""What ranks are asked to do with models. With no group, the same in one process."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from omni_grpc.loading.loader import Edit, Loader
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.request import Request
from omni_grpc.spec import Checkpoint
from omni_grpc.worker.packed import PackedRunner
from tests.parallel.jobs import FEATURES, Feature, Group, Work, context, watched


def load(group: Group, checkpoint: Checkpoint, features: Sequence[str]) -> Pipeline:
    def edits(before: bool) -> list[Edit]:
        chosen = [FEATURES[name] for name in FEATURES if name in features]
        return [functools.partial(edit, feature) for feature in chosen if feature.before == before]

    def edit(feature: Feature, module: nn.Module, component: str) -> None:
        feature.apply(module, feature.section, context(group, checkpoint.spec, component))

    module, _, name = checkpoint.spec.pipeline.partition(":")
    kind: type[Pipeline] = getattr(importlib.import_module(module), name)
    return kind.load(
        Loader(
            checkpoint=checkpoint,
            device=torch.device("cpu"),
            dtype=torch.float32,
            before=edits(True),
            after=edits(False),
        )
    )


def run_model(
    group: Group, checkpoint: Checkpoint, features: Sequence[str], joins: Sequence[tuple[int, Request]]
) -> tuple[dict[str, Tensor], Work, int]:
    """Requests with the tick at which each joins -> the latents of each, and the weights of the denoisers."""
    pipeline = load(group, checkpoint, features)
    runner = PackedRunner(pipeline, torch.device("cpu"), "omni-test-ranks-")
    running: list[str] = []
    with watched() as work:
        for tick in itertools.count():
            for request in [request for at, request in joins if at == tick]:
                runner.prepare(request)
                running.append(request.id)
            report = runner.step(running)
            assert report.broken == ()
            running = [progress.id for progress in report.progress if not progress.finished]
            if not running and tick >= max(at for at, _ in joins):
                break
    latents = {name: torch.stack([state.latents for state in held.states]) for name, held in runner._held.items()}
    return latents, work, sum(parameter.numel() for parameter in pipeline.parameters())
