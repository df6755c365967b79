"""Rotary position embedding (https://arxiv.org/abs/2104.09864) over several axes, on interleaved pairs of channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rope_table(
    positions: Tensor, axes: Sequence[int], theta: float = 10_000.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Cosine and sine of every token's angles: positions [T, A] -> float32 [T, D / 2, 2], D the sum of `axes`.

    Axis a turns the next axes[a] / 2 pairs of channels. Angles are computed in `dtype`: float32 for models that were
    trained with float32 tables, float64 for the others.
    """
    if positions.shape[-1] != len(axes) or any(size % 2 for size in axes):
        raise ValueError(
            f"positions {tuple(positions.shape)} need one column per axis, and even axes, got {tuple(axes)}"
        )
    angles = [
        torch.outer(
            column.to(dtype), 1.0 / theta ** (torch.arange(0, size, 2, dtype=dtype, device=column.device) / size)
        )
        for column, size in zip(positions.unbind(1), axes, strict=True)
    ]
    angle = torch.cat(angles, 1)
    return torch.stack([angle.cos(), angle.sin()], -1).float()


def rotate_interleaved(x: Tensor, table: Tensor) -> Tensor:
    """Turns the channel pairs (0, 1), (2, 3), ... of x [T, H, D] by table [T, D / 2, 2], in float32; x's dtype.

    A pair is a complex number and its turn a product: three passes over x, where the same in real numbers takes eight.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(table)[:, None]).flatten(-2).to(x.dtype)
