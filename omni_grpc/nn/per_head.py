"""A learned value for each head of an attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PerHead(nn.Module):
    """A value for each head, or one for all. It has a class of its own, so that a feature that spreads heads over ranks
    can give each rank those of its heads.
    """

    def __init__(self, values: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(values))

    def forward(self) -> Tensor:
        """[heads] or [1], in the dtype of the weight."""
        return self.weight
