"""Tiny checkpoints of every tested pipeline, and the adapter driven without an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_grpc.adapter.runner import SessionRunner
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import OmniError
from omni_grpc.types.plan import Decoded, Prepared, RequestStep
from omni_grpc.types.request import Draft, Request
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import Checkpoint
from omni_grpc.worker.base import LoadedModel, RunnerContext

GRADIENT = np.linspace(0, 255, 64 * 64 * 3).astype(np.uint8).reshape(64, 64, 3)
"""A picture to start from."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """A worker in this process (Omni) sets torch's threads for every thread that starts after it, and not for this one:
    both sides of a comparison must run on as many, or they round differently.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint by the name of its builder, built once."""
    from tools.tiny_checkpoints import BUILDERS

    built: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in built:
            built[name] = BUILDERS[name](tmp_path_factory.mktemp("tiny") / name)
        return built[name]

    return folder


@dataclasses.dataclass
class Ran:
    """What came of one request: its parts in the worker's own words, and the files."""

    request: Request
    prepared: Prepared
    progress: list[RequestStep]
    decoded: Decoded
    files: list[bytes]
    result: Any

    @property
    def output(self) -> Any:
        """The pictures, or the first of what there is."""
        return self.result[0]

    @property
    def warnings(self) -> dict[str, RequestWarning]:
        return {warning.code: warning for warning in self.decoded.warnings}


class Adapter:
    """A loaded SessionRunner and the checkpoint that it reported."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        assert isinstance(loaded.runner, SessionRunner)
        assert loaded.checkpoint is not None
        self.loaded = loaded
        self.runner = loaded.runner
        self.checkpoint: Checkpoint = loaded.checkpoint
        self.pipeline = loaded.runner._pipeline
        self.config = config
        self._ids = iter(range(10_000))

    def request(self, **fields: Any) -> Request:
        task = fields.pop("task", self.checkpoint.spec.tasks[0])
        draft = Draft(model=self.checkpoint.name, prompt=fields.pop("prompt", "a red cat"), task=task, **fields)
        facts = ServingFacts(self.checkpoint, self.config.limits, found=self.loaded.found)
        return resolve_request(draft, facts, id=f"job_{next(self._ids)}").request

    def run(self, **fields: Any) -> Ran:
        """One request from its prepare to its files, as the engine drives it."""
        request = self.request(**fields)
        prepared = self.runner.prepare(request)
        progress = list(self.steps(request))
        session = self.runner._sessions[request.id].session
        decoded = self.runner.decode(request.id)
        self.runner.drop((request.id,))
        files = [shared.take(media.data) for media in decoded.media]
        return Ran(request, prepared, progress, decoded, files, session.output())

    def steps(self, request: Request) -> Iterator[RequestStep]:
        while True:
            stepped = self.runner.step((request.id,))
            for broken in stepped.broken:
                raise broken.failure.error()
            (progress,) = stepped.progress
            yield progress
            if progress.finished:
                return


@pytest.fixture
def load(tiny: Callable[[str], Path]) -> Callable[..., Adapter]:
    """Loads a tiny checkpoint through the adapter, with settings as flags have them."""

    def loaded(name: str | Path, **settings: Any) -> Adapter:
        folder = name if isinstance(name, Path) else tiny(name)
        config = EngineConfig.from_settings(model=str(folder), diffusion_load_format="diffusers", **settings)
        checkpoint = open_checkpoint(folder, load_format="diffusers")
        setting = RunnerContext(
            config=config,
            checkpoint=checkpoint,
            device=torch.device("cpu"),
            dtype=torch.float32,
            prefix=f"omni_grpc-test-{folder.name}-{id(config)}-",
            tell=lambda loading: None,
        )
        return Adapter(SessionRunner.load(setting), config)

    return loaded


@pytest.fixture
def plain(tiny: Callable[[str], Path]) -> Callable[..., Any]:
    """Calls a freshly loaded pipeline of diffusers, as its own documentation does. The first output, or `whole`."""

    def call(
        name: str, *, like: Adapter | None = None, seeds: tuple[int, ...] = (0,), whole: bool = False, **arguments: Any
    ) -> Any:
        from diffusers import DiffusionPipeline

        pipeline = DiffusionPipeline.from_pretrained(tiny(name), local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        if like is not None:
            same_memory(pipeline, like.pipeline)
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        generator = generators[0] if len(generators) == 1 else generators
        result = pipeline(prompt=arguments.pop("prompt", "a red cat"), generator=generator, **arguments)
        return result if whole else result[0]

    return call


def same_memory(pipeline: Any, other: Any) -> None:
    """Weights that are mapped from a file may lie unaligned, and then products round differently: both get their own.

    The random state is put back, so that neither run sees what loading drew.
    """
    for part in (pipeline, other):
        for module in part.components.values():
            if isinstance(module, torch.nn.Module):
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.data = tensor.data.clone()


def equal(one: Any, other: Any) -> bool:
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))


def check_steps(ran: Ran) -> None:
    """Every step came once, in order, with the true total, and the last one says that it is the last."""
    steps = [progress.step for progress in ran.progress]
    assert steps == list(range(1, ran.progress[-1].total + 1))
    assert len({progress.total for progress in ran.progress}) == 1
    assert [progress.finished for progress in ran.progress] == [False] * (len(steps) - 1) + [True]
    assert ran.decoded.steps == len(steps)
    assert all(progress.sigma > 0 for progress in ran.progress)


def refused(error: OmniError) -> set[str]:
    return {violation.field for violation in error.violations}
