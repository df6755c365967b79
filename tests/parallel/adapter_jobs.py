"""Jobs of ranks that load an adapter while they run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from omni_grpc.features.lora import Adapters
from omni_grpc.types.errors import OmniError
from omni_grpc.types.plan import LoadAdapter
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Checkpoint
from omni_grpc.worker.build import build
from omni_grpc.worker.packed import PackedRunner
from tests.parallel.model_jobs import PREFIX, Ranked, told


def loaded(mesh: Ranked, checkpoint: Checkpoint, **settings: Any) -> tuple[PackedRunner, Adapters]:
    setting = told(mesh, checkpoint, warm_up_seconds=0, **settings)
    pretend: Any = SimpleNamespace(join=lambda device: mesh)
    runner, residency, _ = build(setting.config, checkpoint, PREFIX, setting.tell, membership=pretend)
    assert isinstance(runner, PackedRunner)
    assert isinstance(residency.adapters, Adapters)
    return runner, residency.adapters


def made(runner: PackedRunner, adapters: Adapters, request: Request) -> Tensor:
    """The latents of a request that runs alone."""
    adapters.admit(request)
    runner.prepare(request)
    for _ in range(request.steps):
        assert runner.step([request.id]).broken == ()
    latents = torch.stack([state.latents for state in runner._held[request.id].states]).cpu()
    runner.drop([request.id])
    adapters.release(request.id)
    return latents


def at_run_time(
    mesh: Ranked, checkpoint: Checkpoint, file: Path, base: Request, changed: Request
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Without an adapter before it is loaded, with it, and without it afterwards; and its bytes on this rank."""
    runner, adapters = loaded(mesh, checkpoint, lora_device_cache=1 << 30)
    before = made(runner, adapters, base)
    order = LoadAdapter(id="a", uid="a@1", path=str(file))
    nbytes = adapters.attach(adapters.load(order)).nbytes
    changed_by_it = made(runner, adapters, changed)
    entry = adapters.unload("a@1")
    assert entry is not None
    adapters.remove(entry)
    return before, changed_by_it, made(runner, adapters, base), nbytes


def at_start(mesh: Ranked, checkpoint: Checkpoint, file: Path, changed: Request) -> Tensor:
    runner, adapters = loaded(mesh, checkpoint, lora={"a": str(file)})
    return made(runner, adapters, changed)


def one_without_room(mesh: Ranked, checkpoint: Checkpoint, file: Path, changed: Request) -> tuple[str, Tensor]:
    """The second rank has no room at first: the reason that each rank refuses the request for, and what comes of it
    later.
    """
    runner, adapters = loaded(mesh, checkpoint, lora_device_cache=1 << 30)
    adapters.attach(adapters.load(LoadAdapter(id="a", uid="a@1", path=str(file))))
    adapters.sleep()
    adapters.wake()
    if mesh is not None and mesh.rank == 1:
        adapters.device.limit = 0
    try:
        adapters.admit(changed)
        reason = ""
    except OmniError as error:
        reason = error.reason
    adapters.device.limit = 1 << 30
    return reason, made(runner, adapters, changed)
