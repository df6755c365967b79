"""The causal video VAEs of diffusers (AutoencoderKLWan and those like it) made faster, with the same
weights and classes.

Before the first frame there is only padding, so its causal convolution over three frames is a convolution of that frame
alone, with the last third of the weights. And on a CPU, where torch has no fast 3D convolution, frames become channels
of a 2D convolution.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Vae = TypeVar("Vae", bound=Any)
MIN_NORM = 1e-12
"""The smallest norm that F.normalize divides by."""


def optimize_causal_vae(vae: Vae) -> Vae:
    """Makes the causal convolutions and RMS norms of a VAE faster, in place; returns the VAE. Its modules stay
    instances of their classes, by which diffusers counts and finds them.
    """
    for part in vae.modules():
        kind: Any = type(part)
        if isinstance(part, nn.Conv3d) and hasattr(part, "_padding"):
            part.__class__ = _fast_convolution(kind)
        elif kind.__name__.endswith("RMS_norm"):
            part.__class__ = _fast_norm(kind)
    return vae


@functools.cache
def _fast_convolution(kind: Any) -> Any:
    """kind: a Conv3d whose `_padding` (left, right, top, bottom, frames before, after) is its own to do."""

    class Simplified(kind):  # type: ignore[misc]
        def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
            frames_before = self._padding[4]
            first = x.shape[2] == 1 and cache_x is None and frames_before == self.kernel_size[0] - 1
            if not _is_symmetric(self) or not (first or _conv3d_is_slow(x)):
                out: Tensor = super().forward(x, cache_x)
                return out
            if first:
                return _conv2d(self, x[:, :, 0], self.weight[:, :, -1])[:, :, None]
            if cache_x is not None and frames_before:
                x = torch.cat([cache_x, x], 2)
                frames_before -= cache_x.shape[2]
            return _conv3d_as_conv2d(self, F.pad(x, (0, 0, 0, 0, frames_before, 0)))

    return _keep_name(Simplified, kind)


def _is_symmetric(conv: Any) -> bool:
    left, right, top, bottom, _, after = conv._padding
    return bool(left == right and top == bottom and after == 0 and conv.groups == 1 and set(conv.dilation) == {1})


def _conv3d_is_slow(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32


def _conv2d(conv: Any, x: Tensor, weight: Tensor) -> Tensor:
    """x [B, C, H, W] and weight [O, C, h, w] -> [B, O, H', W']."""
    return F.conv2d(x, weight.contiguous(), conv.bias, conv.stride[1:], (conv._padding[2], conv._padding[0]))


def _conv3d_as_conv2d(conv: Any, x: Tensor) -> Tensor:
    """x [B, C, T, H, W], padded with frames, -> [B, O, T', H', W']."""
    size, step = conv.kernel_size[0], conv.stride[0]
    many = (x.shape[2] - size) // step + 1
    frames = [x[:, :, at : at + (many - 1) * step + 1 : step] for at in range(size)]
    together = torch.cat(frames, 1).transpose(1, 2).flatten(0, 1)
    out: Tensor = _conv2d(conv, together, conv.weight.transpose(1, 2).flatten(1, 2)).unflatten(0, (-1, many))
    return out.transpose(1, 2).contiguous()


@functools.cache
def _fast_norm(kind: Any) -> Any:
    """kind: a norm that F.normalize is most of; on a CPU torch's norm along channels is slow."""

    class Simplified(kind):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            if not _conv3d_is_slow(x):
                out: Tensor = super().forward(x)
                return out
            length = x.square().sum(1 if self.channel_first else -1, keepdim=True).sqrt_().clamp_min_(MIN_NORM)
            normed: Tensor = (x / length).mul_(self.scale).mul_(self.gamma)
            return normed.add_(self.bias) if isinstance(self.bias, Tensor) else normed

    return _keep_name(Simplified, kind)


def _keep_name(made: Any, kind: Any) -> Any:
    made.__name__ = made.__qualname__ = kind.__name__
    return made
