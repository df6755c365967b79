"""Training on all GPUs of a machine: every rank draws scenes of its own, and gradients are averaged.

Parameters and gradients lie in one tensor each, so one all-reduce, one optimiser step and one moving average serve them
all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALIGNED = 64
"""Elements from the start of one parameter to that of the next are a multiple of this: kernels want 256 bytes."""


class Flat:
    """The parameters of a module as one tensor, of which they become views; so do their gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.sizes = [-(-parameter.numel() // ALIGNED) * ALIGNED for parameter in self.parameters]
        self.value = nn.Parameter(self.join([parameter.detach() for parameter in self.parameters]))
        self.value.grad = torch.zeros_like(self.value)
        if dist.is_initialized():
            dist.broadcast(self.value.data, 0)
        for parameter, view, grad in zip(
            self.parameters, self.split(self.value.data), self.split(self.value.grad), strict=True
        ):
            parameter.data, parameter.grad = view, grad

    def split(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor in the shapes of the parameters."""
        return [
            part[: parameter.numel()].view(parameter.shape)
            for part, parameter in zip(flat.split(self.sizes), self.parameters, strict=True)
        ]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """What `split` takes apart, in float32 on the device of the parameters."""
        flat = torch.zeros(sum(self.sizes), device=self.parameters[0].device)
        for part, tensor in zip(flat.split(self.sizes), tensors, strict=True):
            part[: tensor.numel()] = tensor.flatten()
        return flat

    def average_grad(self, limit: float) -> None:
        """Averages the gradient over the ranks and clips its norm."""
        grad = self.value.grad
        assert grad is not None
        if dist.is_initialized():
            dist.all_reduce(grad, dist.ReduceOp.AVG)
        grad.mul_((limit / (grad.norm() + 1e-6)).clamp(max=1.0))


def agreed(value: float) -> float:
    """What the first rank says, such as its clock: ranks must take the same number of steps at the same rates."""
    if not dist.is_initialized():
        return value
    told = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.broadcast(told, 0)
    return float(told)


def averaged(value: Tensor) -> Tensor:
    """The mean over the ranks."""
    if dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.AVG)
    return value
