"""What can be added to any model: each file edits seams (Linear, Attention, Stack) and exports one function,

    apply(module, config, context) -> None

`module` is a denoiser, `config` the feature's own section of the configuration. A feature knows no model and no other
feature; worker/build.py alone says in which order they are applied.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed import ProcessGroup

from omni_grpc.spec import ModelSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a feature is told about the denoiser that it edits: which component of which model it is, where its weights
    live, and the ranks it is spread over (None: there is one).
    """

    component: str
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    ranks: ProcessGroup | None = None
