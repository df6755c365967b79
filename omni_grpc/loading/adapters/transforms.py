"""Changes of a layer that depend on the weight that it has, so that they cannot be added to its output: they make a new
weight of it. W is [out, in] in float32, s is the scale of the file times that of the request.

Formulas: DoRA (https://arxiv.org/abs/2402.09353) as PEFT scales it; OFT (https://arxiv.org/abs/2306.07280) and BOFT
(https://arxiv.org/abs/2311.06243) as LyCORIS and PEFT have them; GLoRA (https://arxiv.org/abs/2306.07967); LoHa
(https://arxiv.org/abs/2108.06098) of a rank that is too large to be a LoRA.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, Self

import torch
from torch import Tensor


class Additive(Protocol):
    """A change that is added to a weight [out, in]."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def dense(self) -> Tensor:
        """float32 [out, in]."""

    def rows(self, kept: slice) -> Additive:
        """These rows of it."""


class Transform(Protocol):
    """A change that makes a new weight [out, in] of the layer's."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def is_zero(self) -> bool:
        """Whether it changes nothing, whatever the weight."""

    @property
    def by_rows(self) -> bool:
        """Whether a row of the new weight depends on that row of the old one alone."""

    def merged(self, weight: Tensor, scale: float) -> Tensor:
        """The new weight, float32 [out, in]; the old one is left as it is."""

    def rows(self, kept: slice) -> Transform:
        """What it makes of these rows; only where it is `by_rows`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loha:
    """W + s (up1 @ down1) * (up2 @ down2), element by element. up: [out, r], down: [r, in]."""

    down1: Tensor
    up1: Tensor
    down2: Tensor
    up2: Tensor

    @property
    def by_rows(self) -> bool:
        return True

    @property
    def shape(self) -> tuple[int, int]:
        return self.up1.shape[0], self.down1.shape[1]

    @property
    def is_zero(self) -> bool:
        return not all(factor.any() for factor in (self.down1, self.up1, self.down2, self.up2))

    def dense(self) -> Tensor:
        """float32 [out, in]."""
        return (self.up1.float() @ self.down1.float()) * (self.up2.float() @ self.down2.float())

    def merged(self, weight: Tensor, scale: float) -> Tensor:
        return weight + scale * self.dense()

    def rows(self, kept: slice) -> Self:
        return dataclasses.replace(self, up1=self.up1[kept], up2=self.up2[kept])


@dataclasses.dataclass(frozen=True, slots=True)
class Dora:
    """V = W + s * change, and W' = V * magnitude / |V|. The norm is that of each output's weights, and magnitude [out];
    or with `by_output` False that of each input's, and magnitude [in].
    """

    change: Additive
    magnitude: Tensor
    by_output: bool

    @property
    def by_rows(self) -> bool:
        return self.by_output

    @property
    def shape(self) -> tuple[int, int]:
        return self.change.shape

    @property
    def is_zero(self) -> bool:
        return False

    def merged(self, weight: Tensor, scale: float) -> Tensor:
        whole = weight + scale * self.change.dense().float()
        norm = torch.linalg.vector_norm(whole, dim=int(self.by_output), keepdim=True)
        magnitude = self.magnitude.float()[:, None] if self.by_output else self.magnitude.float()[None]
        # where there is nothing, nothing is rescaled
        return whole * torch.where(norm > 0, magnitude / norm, 1.0)

    def rows(self, kept: slice) -> Self:
        return dataclasses.replace(self, change=self.change.rows(kept), magnitude=self.magnitude[kept])


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Rotates blocks [n, b, b] of b channels each, of channels in the order `order` (None: as they are)."""

    blocks: Tensor
    order: Tensor | None = None

    def apply(self, weight: Tensor) -> Tensor:
        """weight [channels, ...] -> the same shape."""
        count, size, _ = self.blocks.shape
        taken = weight if self.order is None else weight[self.order]
        turned = torch.bmm(self.blocks.float(), taken.reshape(count, size, -1)).reshape(weight.shape)
        if self.order is None:
            return turned
        out = torch.empty_like(turned)
        out[self.order] = turned
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Rotation:
    """W' = rescale * R W over outputs, or rescale * W R^T over inputs (`of_inputs`), R being all stages one after the
    other; and W + s (W' - W). rescale: [out], None for ones.
    """

    stages: tuple[Stage, ...]
    shape: tuple[int, int]
    of_inputs: bool
    rescale: Tensor | None = None

    @property
    def by_rows(self) -> bool:
        return self.of_inputs

    @property
    def is_zero(self) -> bool:
        still = all(
            torch.equal(part.blocks, torch.eye(part.blocks.shape[-1]).expand_as(part.blocks)) for part in self.stages
        )
        return still and (self.rescale is None or bool((self.rescale == 1).all()))

    def merged(self, weight: Tensor, scale: float) -> Tensor:
        turned = weight.T if self.of_inputs else weight
        for stage in self.stages:
            turned = stage.apply(turned)
        turned = turned.T if self.of_inputs else turned
        if self.rescale is not None:
            turned = turned * self.rescale.float()[:, None]
        return torch.lerp(weight, turned, scale)

    def rows(self, kept: slice) -> Self:
        size = len(range(*kept.indices(self.shape[0])))
        rescale = None if self.rescale is None else self.rescale[kept]
        return dataclasses.replace(self, shape=(size, self.shape[1]), rescale=rescale)


@dataclasses.dataclass(frozen=True, slots=True)
class Glora:
    """W + s (W a1 a2 + b1 b2). a1 [in, r], a2 [r, in], b1 [out, r], b2 [r, in]."""

    a1: Tensor
    a2: Tensor
    b1: Tensor
    b2: Tensor

    @property
    def by_rows(self) -> bool:
        return True

    @property
    def shape(self) -> tuple[int, int]:
        return self.b1.shape[0], self.b2.shape[1]

    @property
    def is_zero(self) -> bool:
        return not (self.a1.any() and self.a2.any()) and not (self.b1.any() and self.b2.any())

    def merged(self, weight: Tensor, scale: float) -> Tensor:
        change = (weight @ self.a1.float()) @ self.a2.float() + self.b1.float() @ self.b2.float()
        return weight + scale * change

    def rows(self, kept: slice) -> Self:
        return dataclasses.replace(self, b1=self.b1[kept])


@dataclasses.dataclass(frozen=True, slots=True)
class Replaced:
    """W + s (weight - W): another weight [out, in] in the place of the layer's."""

    weight: Tensor

    @property
    def by_rows(self) -> bool:
        return True

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def is_zero(self) -> bool:
        return False

    def merged(self, weight: Tensor, scale: float) -> Tensor:
        return torch.lerp(weight, self.weight.float(), scale)

    def rows(self, kept: slice) -> Self:
        return dataclasses.replace(self, weight=self.weight[kept])
