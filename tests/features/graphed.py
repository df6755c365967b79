"""Models whose denoisers have CUDA graphs without CUDA: a recorder computes again where CUDA launches again. It reads
nothing of a batch but what was put into the tensors of its kind, as a graph does.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from omni_grpc.config import WorkerConfig
from omni_grpc.features import Context, cuda_graphs
from omni_grpc.features.cuda_graphs import Blocks, CapturedBatch, Graphs, Recorder, Replay
from omni_grpc.nn.rows import Owner
from omni_grpc.nn.stack import Carry, main_stack
from omni_grpc.types.request import Request
from omni_grpc.types.step_cache import CacheDraft
from omni_grpc.worker import edits
from tests.features.suite import Suite, company, run
from tests.models.model import Model


class Again(Recorder):
    """Computes what it recorded once more, into the tensors of the first time."""

    def __init__(self, problem: str = "") -> None:
        self.problem = problem
        self.recorded = self.replayed = self.forgotten = 0
        self.here = True

    def usable(self) -> bool:
        return self.here

    def record(self, run: Callable[[], Carry]) -> tuple[Callable[[], None], Carry]:
        if self.problem:
            raise RuntimeError(self.problem)
        self.recorded += 1
        out = {name: x.clone() for name, x in run().items()}

        def replay() -> None:
            self.replayed += 1
            for name, x in run().items():
                out[name].copy_(x)

        return replay, out

    def forget(self) -> None:
        self.forgotten += 1


class Frozen(Graphs):
    """Records with owners as they are: what was looked at in them when it was recorded stays."""

    def _record(self, kept: CapturedBatch, run: Blocks, owners: tuple[Owner, ...]) -> Replay | None:
        return super()._record(kept, run, tuple((copy.copy(state), branch) for state, branch in owners))


def graphed(suite: Suite, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Model, list[Again]]:
    """The model with graphs at their place among the features, and the recorder of each denoiser."""
    recorders: list[Again] = []

    def apply(module: nn.Module, config: WorkerConfig, context: Context) -> None:
        _, stack = main_stack(module)
        recorders.append(Again())
        stack.wrap(Frozen(stack, 1 << 20, recorders[-1]).around)

    assert [feature.name for feature in edits.AFTER].count("cuda_graphs") == 1
    monkeypatch.setattr(cuda_graphs, "apply", apply)
    return Model(suite.entry, suite.folder, **settings), recorders


def later(request: Request, turn: int) -> Request:
    """The same sizes with other noise, and where there are adapters every second time with other scales."""
    loras = tuple(dataclasses.replace(lora, scale=lora.scale + turn % 2) for lora in request.loras)
    return dataclasses.replace(request, seeds=tuple(seed + turn for seed in request.seeds), loras=loras)


def played(recorders: list[Again]) -> bool:
    """Whether each of them was of use."""
    return all(recorder.replayed >= recorder.recorded > 0 for recorder in recorders)


def same_in_turns(plain: Model, model: Model, cache: CacheDraft | None = None) -> None:
    """Unlike requests that join and leave, turn by turn with other noise: in the third turn and after, most batches
    come out of a graph that was recorded from requests that are gone.
    """
    for turn in range(6):
        joins = [(at, later(it, turn)) for at, it in company(plain, cache)]
        expected, got = run(plain, *joins), run(model, *joins)
        for name, one in expected.items():
            assert torch.equal(got[name].latents, one.latents)
            assert got[name].reused == one.reused
