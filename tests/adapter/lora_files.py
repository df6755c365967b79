"""Files of LoRA adapters for tiny pipelines, with random factors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def layers(component: nn.Module, *ends: str) -> list[str]:
    """The paths of the linear layers and convolutions whose names end so; of all without."""
    kinds = (nn.Linear, nn.Conv2d, nn.Conv3d)
    return [path for path, one in component.named_modules() if isinstance(one, kinds) and path.endswith(ends or "")]


def factors(
    component: nn.Module, path: str, rank: int, random: torch.Generator, size: float = 0.3
) -> tuple[Tensor, Tensor]:
    """down [rank, in, ...], up [out, rank, ...], as large as to be seen."""
    shape = component.get_submodule(path).weight.shape
    down = torch.randn(rank, *shape[1:], generator=random) * size
    up = torch.randn(shape[0], rank, *(1 for _ in shape[2:]), generator=random) * size
    return down, up


def peft(pipeline: Any, wanted: Mapping[str, tuple[str, ...]], *, seed: int, rank: int = 4) -> dict[str, Tensor]:
    """As diffusers and PEFT write it; `wanted`: the ends of the names of layers, by component."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for component, ends in wanted.items():
        part = getattr(pipeline, component)
        for path in layers(part, *ends):
            down, up = factors(part, path, rank, random)
            tensors[f"{component}.{path}.lora_A.weight"], tensors[f"{component}.{path}.lora_B.weight"] = down, up
    return tensors


def kohya(
    pipeline: Any, wanted: Mapping[str, tuple[str, ...]], prefixes: Mapping[str, str], *, seed: int, alpha: float | None
) -> dict[str, Tensor]:
    """As sd-scripts writes it: ranks of 2 and 4 in turn, and an alpha for each layer."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for component, ends in wanted.items():
        part = getattr(pipeline, component)
        for number, path in enumerate(layers(part, *ends)):
            rank = 2 + 2 * (number % 2)
            name = prefixes[component] + path.replace(".", "_")
            down, up = factors(part, path, rank, random)
            tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"] = down, up
            if alpha is not None:
                tensors[f"{name}.alpha"] = torch.tensor(alpha)
    return tensors


def save(tensors: Mapping[str, Tensor], file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    return file


def keys(file: Path) -> list[str]:
    return list(load_file(file))
