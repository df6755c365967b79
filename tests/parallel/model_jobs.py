"""What ranks are asked to do with models. With no group, the same in one process."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omni_grpc.config import EngineConfig
from omni_grpc.features import Effects
from omni_grpc.features import attention as by_role
from omni_grpc.features.hsdp import Sharded
from omni_grpc.features.quant import QuantizedLinear
from omni_grpc.loading.checkpoint import WeightTargets
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.pipeline.text_encoders import TextEncoder
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.plan import CostModel, RequestStep
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Checkpoint
from omni_grpc.worker.base import RunnerContext
from omni_grpc.worker.build import build
from omni_grpc.worker.edits import loader
from omni_grpc.worker.lanes import Lanes
from omni_grpc.worker.packed import PackedRunner, load_pipeline
from omni_grpc.worker.reachable import movable, tensors
from tests.parallel.jobs import Ranked, Work, context, device_of, watched
from tests.worker.host_device import PretendMemory

PREFIX = "omni-test-ranks-"

Features = Mapping[str, Any]
"""Settings of the server, and "roles" for attention that no setting describes."""


def told(mesh: Ranked, checkpoint: Checkpoint, **settings: Any) -> RunnerContext:
    """What a worker's runner is told."""
    return RunnerContext(
        config=EngineConfig.from_settings(model=str(checkpoint.path), dtype="float32", **settings),
        checkpoint=checkpoint,
        device=device_of(mesh),
        dtype=torch.float32,
        prefix=PREFIX,
        tell=lambda loading: None,
        ranks=mesh,
    )


def load(mesh: Ranked, checkpoint: Checkpoint, features: Features) -> Pipeline:
    """As the worker does it, with every feature of the settings and of the mesh."""
    given = dict(features)
    roles = given.pop("roles", None)
    setting = told(mesh, checkpoint, warm_up_seconds=0, **given)
    effects = Effects()
    parts = loader(setting, effects, Lanes())
    if roles is not None:

        def choose(module: nn.Module, component: str, places: WeightTargets) -> None:
            by_role.apply(module, roles, context(mesh, checkpoint.spec, component))

        parts = dataclasses.replace(parts, after=[choose, *parts.after])
    return load_pipeline(parts, effects, setting)


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """The latents of each request, what they took, how often a cache answered for rows of each, what it measured (the
    sum of the changes, and their number), and the weights of all components but text encoders, which are the first
    rank's alone: test_encode_once.py.
    """

    latents: dict[str, Tensor]
    work: Work
    reused: dict[str, int]
    change: float
    measured: int
    weights: int


def refused(mesh: Ranked, checkpoint: Checkpoint, features: Features) -> str:
    """What is said to features that do not go together."""
    try:
        load(mesh, checkpoint, features)
    except ConfigError as error:
        return str(error)
    return ""


def quantized_layers(mesh: Ranked, checkpoint: Checkpoint, features: Features) -> set[str]:
    """The layers in 8 bits, by the names that they have without what is around them."""
    return {
        name.removesuffix(".inner")
        for name, module in load(mesh, checkpoint, features).named_modules()
        if isinstance(module, QuantizedLinear)
    }


def run_asleep(
    mesh: Ranked, checkpoint: Checkpoint, features: Features, joins: Sequence[tuple[int, Request]]
) -> tuple[Made, Made]:
    """What comes of requests before and after a model was asleep whose text encoders and VAE leave between phases."""
    setting = told(mesh, checkpoint, warm_up_seconds=0, enable_cpu_offload=True, **features)
    pretend: Any = SimpleNamespace(join=lambda device: mesh)
    runner, residency, _ = build(
        setting.config, checkpoint, PREFIX, setting.tell, memory=PretendMemory(), membership=pretend
    )
    assert isinstance(runner, PackedRunner)
    before = _run(runner, joins)
    runner.drop([request.id for _, request in joins])
    residency.sleep()
    assert not movable(tensors(residency.components), setting.device)
    residency.wake()
    return before, _run(runner, joins)


def run_model(mesh: Ranked, checkpoint: Checkpoint, features: Features, joins: Sequence[tuple[int, Request]]) -> Made:
    """Requests, each with the tick at which it joins."""
    pipeline = load(mesh, checkpoint, features)
    return _run(PackedRunner(pipeline, device_of(mesh), PREFIX), joins)


def _run(runner: PackedRunner, joins: Sequence[tuple[int, Request]]) -> Made:
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
        weights=sum(_weights(part) for part in runner._pipeline.children() if not isinstance(part, TextEncoder)),
    )


def _weights(component: nn.Module) -> int:
    return sum(parameter.numel() for parameter in component.parameters()) + sum(
        mine.numel() // part.dtype.itemsize
        for layer in component.modules()
        if isinstance(layer, Sharded)
        for mine, part in zip(layer.buffers(recurse=False), layer.parts.values(), strict=True)
    )


@torch.inference_mode()
def serve(mesh: Ranked, checkpoint: Checkpoint, request: Request, warm_up_seconds: float) -> tuple[Tensor, CostModel]:
    """The runner of a worker, from its load to the pixels of one request: [outputs, height, width, 3]; and what its
    warm-up found.
    """
    loaded = PackedRunner.load(told(mesh, checkpoint, warm_up_seconds=warm_up_seconds))
    runner = loaded.runner
    assert isinstance(runner, PackedRunner)
    runner.prepare(request)
    while not all(progress.finished for progress in runner.step([request.id]).progress):
        pass
    states = runner._held[request.id].states
    pixels = [runner._pipeline.decode(state, state.latents)[0].pixels for state in states]
    return torch.from_numpy(np.stack(pixels)), loaded.cost
