"""Modulation that requests share: what is made once, and what keeps two of them apart."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import torch
from torch import nn

from omni_grpc.pipeline.state import Tables
from omni_grpc.pipeline.tables import SharedTables
from omni_grpc.types.lora import Lora


class ByAdapters(nn.Module):
    """A layer that a request's adapters change, as a feature puts it into a denoiser."""

    def __init__(self) -> None:
        super().__init__()
        self.variant = lambda owner: owner[0].request.loras


def state(*timesteps: float, loras: tuple[Lora, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(schedule=SimpleNamespace(timesteps=timesteps), request=SimpleNamespace(loras=loras))


def test_tables_are_shared_by_the_same_timesteps_under_the_same_weights() -> None:
    shared, made = SharedTables(nn.Sequential(ByAdapters())), []

    def make() -> dict[str, torch.Tensor]:
        made.append(1)
        return {"mod": torch.full((1, 1), float(len(made)))}

    first = shared.get(state(1000.0, 500.0), make)
    assert first["mod"].item() == 1
    assert shared.get(state(1000.0, 500.0), make) is first
    style = (Lora(lora_id="style"),)
    others = [
        shared.get(state(1000.0, 250.0), make),
        shared.get(state(1000.0, 500.0, loras=style), make),
        shared.get(state(1000.0, 500.0, loras=(Lora(lora_id="style", scale=0.5),)), make),
        shared.get(state(1000.0, 500.0, loras=(Lora(lora_id="style", target="transformer_2"),)), make),
        shared.get(state(1000.0, 500.0), make, 3.5),
    ]
    assert len(made) == 6
    assert len({id(table) for table in (first, *others)}) == 6
    assert shared.get(state(1000.0, 500.0, loras=style), make) is others[1]
    assert shared.get(state(1000.0, 500.0), make, 3.5) is others[4]
    assert len(made) == 6


def test_what_no_part_of_the_denoiser_looks_at_keeps_no_two_apart() -> None:
    shared = SharedTables(nn.Sequential(nn.Identity()))
    first = shared.get(state(1.0), lambda: {"mod": torch.zeros(1)})
    assert shared.get(state(1.0, loras=(Lora(lora_id="style"),)), lambda: {"mod": torch.ones(1)}) is first


def test_tables_live_as_long_as_somebody_holds_them() -> None:
    shared = SharedTables(nn.Identity())
    kept = shared.get(state(1.0), lambda: {"mod": torch.zeros(1)})
    assert isinstance(kept, Tables)
    assert len(shared._tables) == 1
    del kept
    gc.collect()
    assert len(shared._tables) == 0
