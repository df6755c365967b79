"""VAE decode over ranks: each decodes a slab of rows of every frame, with the pixels of one process.

A convolution reads a few rows above and below what it writes: ranks send each other the edge rows of what each
convolution reads, so a slab's convolutions see what they would see in the whole frame. A group norm sums its statistics
over all ranks. Attention, which is in the smallest resolution alone, gets the whole frame, and keeps the slab.

Decodes run beside steps, so they have process groups of their own.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.config import AdapterConfig
from omni_grpc.features import Context
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.pipeline.vae import Vae
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.ranks import Axis

__all__ = ["apply"]

SETTING = "vae_patch_parallel_size"
POINTWISE = ("SiLU", "Identity", "Dropout", "Upsample", "DupUp3D", "RMS_norm", "Flatten")
"""How the classes of layers end that compute rows of a frame from the same rows alone, or double them."""

Decode = Callable[[Tensor], Tensor]


def apply(pipeline: Pipeline, config: AdapterConfig, context: Context) -> None:
    """Spreads the decoder of a pipeline's VAE over the ranks of "vae". Raises ConfigError for a decoder with a layer
    of which it is not known which rows it reads, and for tiles, which are decoded one by one.
    """
    group = context.group(Axis.VAE, "a decode over ranks needs ranks to share it")
    if config.vae_use_tiling:
        raise _refused("cannot be combined with vae_use_tiling, which decodes tile by tile; leave one out")
    vae = getattr(pipeline, "vae", None)
    if not isinstance(vae, Vae):
        raise _refused(f"must be 1: {context.spec.name} has no VAE of which ranks can share the decode")
    slabs = Slabs(group)
    _prepare(vae.module.decoder, slabs)
    vae.wrap_decode(slabs.around)


def _prepare(decoder: nn.Module, slabs: Slabs) -> None:
    """Makes the layers of a decoder see their neighbors' rows. Raises ConfigError by name, see `apply`."""
    for path, layer in list(decoder.named_children()):
        kind = type(layer).__name__
        if kind.endswith(("Attention", "AttentionBlock")):
            layer.register_forward_pre_hook(functools.partial(_whole, slabs))
            layer.register_forward_hook(functools.partial(_own_rows, slabs))
        elif isinstance(layer, nn.Conv2d | nn.Conv3d):
            reach = _reach(path, layer)
            if reach:
                layer.register_forward_pre_hook(functools.partial(_with_neighbors, slabs, reach))
                layer.register_forward_hook(functools.partial(_without_neighbors, slabs, reach))
            slabs.reach = max(slabs.reach, reach)
        elif isinstance(layer, nn.GroupNorm):
            setattr(decoder, path, SlabGroupNorm(layer, slabs))
        elif not kind.endswith(POINTWISE):
            if not list(layer.children()):
                raise _refused(f"must be 1: the decoder's {path} is a {kind}, whose rows cannot be shared yet")
            _prepare(layer, slabs)


def _reach(path: str, layer: nn.Conv2d | nn.Conv3d) -> int:
    """The rows above and below a row that a convolution reads."""
    reach, rest = divmod(layer.kernel_size[-2], 2)
    if rest == 0 or layer.stride[-2] != 1 or layer.dilation[-2] != 1 or layer.padding_mode != "zeros":
        raise _refused(f"must be 1: rows of the decoder's {path}, {layer}, cannot be shared yet")
    return reach


def _refused(rule: str) -> ConfigError:
    message = f"--{SETTING.replace('_', '-')} {rule}"
    return ConfigError(message, reason="NOT_SUPPORTED", violations=(Violation(SETTING, rule),))


class Slabs:
    """What the layers of one decoder know of the decode at hand. `reach`: the most rows that a layer reads beyond its
    own on one side. `counts`: rows of each rank in the latents; empty while nothing is shared.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.reach = 0
        self.counts: tuple[int, ...] = ()
        self._lock = threading.Lock()

    def around(self, decode: Decode) -> Decode:
        def shared(latents: Tensor) -> Tensor:
            """[C, frames, h, w] -> [frames, 3, height, width] on every rank."""
            rows = latents.shape[2]
            bounds = [rows * rank // self.size for rank in range(self.size + 1)]
            counts = tuple(end - start for start, end in itertools.pairwise(bounds))
            if min(counts) < max(1, self.reach):
                # so few rows that an edge would be another rank's too: all decode the whole, which is small
                return decode(latents)
            with self._lock:
                self.counts = counts
                try:
                    mine = decode(latents[:, :, bounds[self.rank] : bounds[self.rank + 1]].contiguous())
                    return self.gather(mine)
                finally:
                    self.counts = ()

        return shared

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks, [..., rows of this rank, W] -> [..., rows, W]."""
        times = x.shape[-2] // self.counts[self.rank]
        sent = F.pad(x, (0, 0, 0, times * max(self.counts) - x.shape[-2])).contiguous()
        received = [torch.empty_like(sent) for _ in self.counts]
        dist.all_gather(received, sent, group=self.group)
        parts = [part[..., : times * count, :] for part, count in zip(received, self.counts, strict=True)]
        return torch.cat(parts, -2)

    def rows(self, x: Tensor) -> Tensor:
        """This rank's part of what `gather` makes: [..., rows, W] -> [..., rows of this rank, W]."""
        times = x.shape[-2] // sum(self.counts)
        start = times * sum(self.counts[: self.rank])
        return x[..., start : start + times * self.counts[self.rank], :]

    def extend(self, x: Tensor, reach: int) -> Tensor:
        """x [..., rows, W] with so many rows of the ranks above and below, where there are such ranks."""
        work, above, below = [], None, None
        for step in (-1, 1):
            other = self.rank + step
            if not 0 <= other < self.size:
                continue
            peer = dist.get_global_rank(self.group, other)
            edge = x[..., :reach, :] if step < 0 else x[..., x.shape[-2] - reach :, :]
            received = torch.empty_like(edge, memory_format=torch.contiguous_format)
            work.append(dist.P2POp(dist.isend, edge.contiguous(), peer, self.group))
            work.append(dist.P2POp(dist.irecv, received, peer, self.group))
            above, below = (received, below) if step < 0 else (above, received)
        for each in dist.batch_isend_irecv(work):
            each.wait()
        return torch.cat([part for part in (above, x, below) if part is not None], -2)

    def crop(self, x: Tensor, reach: int) -> Tensor:
        """What `extend` added, taken off again: [..., rows and edges, W] -> [..., rows, W]."""
        start = reach if self.rank else 0
        end = x.shape[-2] - (reach if self.rank + 1 < self.size else 0)
        return x[..., start:end, :].contiguous()


def _with_neighbors(slabs: Slabs, reach: int, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The input of a convolution, and the frames before that some keep, with the rows around them."""
    if not slabs.counts:
        return None
    return tuple(slabs.extend(x, reach) if isinstance(x, Tensor) else x for x in args)


def _without_neighbors(slabs: Slabs, reach: int, layer: nn.Module, args: object, out: Tensor) -> Tensor:
    return slabs.crop(out, reach) if slabs.counts else out


def _whole(slabs: Slabs, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return (slabs.gather(args[0]), *args[1:]) if slabs.counts else None


def _own_rows(slabs: Slabs, layer: nn.Module, args: object, out: Tensor) -> Tensor:
    return slabs.rows(out).contiguous() if slabs.counts else out


class SlabGroupNorm(nn.Module):
    """A group norm whose statistics are those of all ranks: x [B, C, ..., rows of this rank, W] -> the same."""

    def __init__(self, whole: nn.GroupNorm, slabs: Slabs) -> None:
        super().__init__()
        self.whole, self.slabs = whole, slabs

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, ..., rows, W] -> the same, in its dtype. Computed in float32: the mean first, then the squares of
        what differs from it.
        """
        slabs = self.slabs
        if not slabs.counts:
            return cast(Tensor, self.whole(x))
        groups = self.whole.num_groups
        values = x.float().reshape(len(x), groups, -1)
        count = values.shape[2] * sum(slabs.counts) / slabs.counts[slabs.rank]
        mean = values.sum(2, keepdim=True)
        dist.all_reduce(mean, group=slabs.group)
        values = values - mean / count
        variance = values.square().sum(2, keepdim=True)
        dist.all_reduce(variance, group=slabs.group)
        normed = (values * torch.rsqrt(variance / count + self.whole.eps)).reshape(x.shape)
        if self.whole.weight is not None:
            shape = (-1, *[1] * (x.dim() - 2))
            normed = normed * self.whole.weight.float().view(shape) + self.whole.bias.float().view(shape)
        return normed.to(x.dtype)
