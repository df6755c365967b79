"""Tables of the rotary position embedding (https://arxiv.org/abs/2104.09864) over several axes."""

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
