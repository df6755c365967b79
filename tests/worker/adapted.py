"""A real worker with a tiny model, which is given orders about adapters."""

from __future__ import annotations

import itertools
import queue
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.features.lora import Adapters
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.lora import Lora
from omni_grpc.types.plan import AdapterLoaded, Decoded, LoadAdapter, Plan, Prepared, Ready, Report, Stepped
from omni_grpc.types.request import Draft, Request
from omni_grpc.worker.worker import Worker

T = TypeVar("T")
SOON = 120
"""Seconds in which a report has to come, on a busy machine too."""

LAYERS: Mapping[str, tuple[int, int]] = {
    "transformer_blocks.0.attn.to_q": (128, 128),
    "transformer_blocks.1.attn.add_v_proj": (128, 128),
    "transformer_blocks.0.img_mod.1": (768, 128),
    "img_in": (128, 64),
}
"""Of the tiny Qwen-Image: a part of a fused layer, one of text, the modulation that requests share, and one beside the
blocks."""


def write(path: Path, seed: int, rank: int = 4, layers: Mapping[str, tuple[int, int]] = LAYERS) -> Path:
    """The file of an adapter."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in layers.items():
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.2
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.2
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, path)
    return path


class Served:
    """A worker that is ready, what it has reported and nobody has asked for yet, and the findings that follow."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self._reports: queue.Queue[Report] = queue.Queue()
        self._kept: list[Report] = []
        usual = {"device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0.0}
        self.config = EngineConfig.from_settings(model=str(model), **usual | settings)
        self.checkpoint = open_checkpoint(self.config.model.model, name="tiny")
        prefix = f"omni-test-{secrets.token_hex(4)}-"
        self.worker = Worker(self.config, self.checkpoint, self._reports.put, prefix)
        self.worker.start()
        self.found: WorkerFindings = self.next(Ready).found
        self._numbers = itertools.count()

    def next(self, kind: type[T]) -> T:
        """The next report of a kind; those before it that are of others wait."""
        for index, report in enumerate(self._kept):
            if isinstance(report, kind):
                del self._kept[index]
                return report
        while True:
            report = self._reports.get(timeout=SOON)
            if isinstance(report, kind):
                return report
            if not isinstance(report, Loading):
                self._kept.append(report)

    def waiting(self, kind: type[T]) -> list[T]:
        """Reports of a kind that have come and were not asked for."""
        while not self._reports.empty():
            self._kept.append(self._reports.get())
        return [report for report in self._kept if isinstance(report, kind)]

    def load(self, id: str, path: Path, uid: str = "", **more: Any) -> AdapterLoaded:
        """Loads an adapter, which requests may name from then on."""
        self.worker.order(LoadAdapter(id=id, uid=uid or f"{id}@1", path=str(path), **more))
        loaded = self.next(AdapterLoaded)
        self.found = self.found.with_adapter(loaded.adapter)
        return loaded

    def request(self, *loras: Lora, name: str = "", steps: int = 2) -> Request:
        draft = Draft(
            model="tiny", prompt="a star", width=32, height=32, steps=steps, seeds=(1,), loras=loras, num_outputs=1
        )
        facts = ServingFacts(self.checkpoint, self.config.limits, found=self.found)
        return resolve_request(draft, facts, id=name or f"job_{next(self._numbers)}").request

    def admit(self, request: Request) -> Prepared:
        self.worker.submit(Plan(admit=(request,)))
        return self.next(Prepared)

    def step(self, *requests: Request) -> Stepped:
        self.worker.submit(Plan(step=tuple(request.id for request in requests)))
        return self.next(Stepped)

    def decode(self, request: Request) -> bytes:
        self.worker.submit(Plan(decode=(request.id,)))
        return bytes(shared.take(self.next(Decoded).media[0].data))

    def make(self, *loras: Lora) -> bytes:
        """The file of a request that runs alone."""
        return self.finish(self.request(*loras))

    def finish(self, request: Request) -> bytes:
        """As `make`, of one that is to be admitted."""
        self.admit(request)
        for _ in range(request.steps):
            self.step(request)
        return self.decode(request)

    @property
    def adapters(self) -> Adapters:
        adapters = self.worker._adapting._adapters
        assert isinstance(adapters, Adapters)
        return adapters


@contextmanager
def served(model: Path, **settings: Any) -> Iterator[Served]:
    it = Served(model, **settings)
    try:
        yield it
    finally:
        it.worker.close()


def use(*ids: str, scale: float = 1.0) -> Sequence[Lora]:
    return [Lora(lora_id=name, scale=scale) for name in ids]
