"""Linear layers of modules that other libraries bring, behind the seam that features edit."""

from __future__ import annotations

from torch import Tensor, nn

from omni_grpc.nn.linear import AnyLinear
from omni_grpc.types.errors import InternalError


class ForeignLinear(AnyLinear):
    """A library's linear layer for packed tokens. It keeps its weights, which the library has loaded."""

    def __init__(self, linear: nn.Linear, *, stream: str) -> None:
        super().__init__()
        self.linear, self.stream = linear, stream
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        """[out, in], of whatever the library keeps."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], as the library computes a batch of one."""
        y: Tensor = self.linear(x[None])[0]
        return y

    def shapes(self) -> dict[str, tuple[int, ...]]:
        bias = {} if self.bias is None else {"bias": (self.out_features,)}
        return {"weight": (self.out_features, self.in_features), **bias}

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """tensor: [...]. Raises InternalError: the library loads its weights itself."""
        raise InternalError(f"{name} of a layer that another library loads")


class PackedInside(nn.Module):
    """Stands for a library's linear layer in its module: `packed`, a layer of ours, for a batch [..., in] of any shape.
    Libraries ask their layers for weight, bias and sizes.
    """

    def __init__(self, linear: nn.Linear, *, stream: str) -> None:
        super().__init__()
        self.packed: AnyLinear = ForeignLinear(linear, stream=stream)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        return self._innermost.weight

    @property
    def bias(self) -> Tensor | None:
        return self._innermost.bias

    @property
    def _innermost(self) -> ForeignLinear:
        """What the library has, whatever is around it."""
        return next(part for part in self.modules() if isinstance(part, ForeignLinear))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        y: Tensor = self.packed(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return y
