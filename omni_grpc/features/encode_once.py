"""Text encoders run once: the first rank encodes a prompt, and the others get what comes of it.

Where their weights are on the device, the others let go of them once they are loaded.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import torch
import torch.distributed as dist
from torch import Tensor

from omni_grpc.features import Context
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.pipeline.text_encoders import PromptEmbeds, TextEncoder
from omni_grpc.types.errors import InternalError
from omni_grpc.types.ranks import Axis

__all__ = ["apply"]


def apply(pipeline: Pipeline, config: object, context: Context) -> None:
    """Has the first rank alone run every text encoder of a pipeline."""
    group = context.group(Axis.WORLD, "encoding once needs ranks that share the prompts")
    first = dist.get_rank(group) == 0
    for name, encoder in list(pipeline.named_children()):
        if isinstance(encoder, TextEncoder):
            if not first:
                _let_go(encoder, context.device)
            setattr(pipeline, name, EncodedOnce(encoder, group, context.device))


def _let_go(encoder: TextEncoder, device: torch.device) -> None:
    """In place: whatever else knows the module has it without its weights. Those that wait on the host stay there."""
    for tensor in itertools.chain(encoder.parameters(), encoder.buffers()):
        if tensor.device.type == device.type:
            tensor.data = tensor.data.new_empty(0)


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What the first rank says before it sends tensors: what they look like, or why there are none."""

    hidden: tuple[torch.Size, torch.dtype] | None = None
    pooled: tuple[torch.Size, torch.dtype] | None = None
    tokens: int = 0
    dropped: int = 0
    error: Exception | None = None


class EncodedOnce(TextEncoder):
    """Around a text encoder. All ranks have to call it for the same prompts in the same order."""

    def __init__(self, inner: TextEncoder, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.inner = inner
        self._group, self._device = group, device
        self._first = dist.get_rank(group) == 0

    def forward(self, prompt: str) -> PromptEmbeds:
        """The embeds of the first rank. Raises on every rank what its encoder raises there."""
        if not self._first:
            return self._received()
        try:
            embeds: PromptEmbeds = self.inner(prompt)
        except Exception as error:
            # the others wait for an answer, whatever it is
            self._tell(Told(error=_portable(error)))
            raise
        self._tell(
            Told(hidden=_like(embeds.hidden), pooled=_like(embeds.pooled), tokens=embeds.tokens, dropped=embeds.dropped)
        )
        for tensor in (embeds.hidden, embeds.pooled):
            if tensor is not None:
                dist.broadcast(tensor.contiguous(), group=self._group, group_src=0)
        return embeds

    def _tell(self, told: Told | None) -> Told:
        said: list[Told | None] = [told]
        dist.broadcast_object_list(said, group=self._group, group_src=0, device=self._device)
        assert said[0] is not None
        return said[0]

    def _received(self) -> PromptEmbeds:
        told = self._tell(None)
        if told.error is not None:
            raise told.error
        hidden, pooled = (self._tensor(like) for like in (told.hidden, told.pooled))
        assert hidden is not None
        return PromptEmbeds(hidden=hidden, pooled=pooled, tokens=told.tokens, dropped=told.dropped)

    def _tensor(self, like: tuple[torch.Size, torch.dtype] | None) -> Tensor | None:
        if like is None:
            return None
        out = torch.empty(like[0], dtype=like[1], device=self._device)
        dist.broadcast(out, group=self._group, group_src=0)
        return out


def _like(tensor: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _portable(error: Exception) -> Exception:
    """The error, or its words where it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))
    except (pickle.PickleError, TypeError, AttributeError):
        return InternalError(f"{type(error).__name__}: {error}")
    return error
