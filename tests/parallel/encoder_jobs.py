"""Jobs on text encoders over ranks."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import nn

from omni_grpc.features import Context
from omni_grpc.features.encode_once import apply
from omni_grpc.nn.mesh import Mesh
from omni_grpc.pipeline.text_encoders import PromptEmbeds, TextEncoder
from omni_grpc.types.errors import InvalidArgument


class Counting(TextEncoder):
    """Encodes a prompt as its length, and refuses "bad"."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.table, self.calls, self.pooled = nn.Embedding(64, 8), 0, pooled
        nn.init.normal_(self.table.weight, generator=torch.Generator().manual_seed(3))

    def forward(self, prompt: str) -> PromptEmbeds:
        self.calls += 1
        if prompt == "bad":
            raise InvalidArgument("prompt: is bad")
        hidden = self.table(torch.arange(len(prompt)))
        pooled = hidden.mean(0, keepdim=True).double() if self.pooled else None
        return PromptEmbeds(hidden=hidden, pooled=pooled, tokens=len(prompt), dropped=2)


@dataclasses.dataclass
class Seen:
    embeds: list[PromptEmbeds]
    error: str
    calls: int
    weights: int


@torch.inference_mode()
def encode(mesh: Mesh | None, prompts: tuple[str, ...], pooled: bool) -> Seen:
    pipeline, encoder = nn.Module(), Counting(pooled)
    pipeline.add_module("text_encoder", encoder)
    pipeline.add_module("other", nn.Linear(2, 2))
    if mesh is not None:
        context = Context(
            component="", spec=cast("Any", None), device=torch.device("cpu"), dtype=torch.float32, ranks=mesh
        )
        apply(cast("Any", pipeline), None, context)
    called: Any = pipeline.get_submodule("text_encoder")
    embeds, error = [], ""
    for prompt in prompts:
        try:
            embeds.append(called(prompt))
        except InvalidArgument as refused:
            error = str(refused)
    return Seen(embeds, error, encoder.calls, encoder.table.weight.numel())
