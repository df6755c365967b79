"""Tensors that are on their way, while something else is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Begun = Callable[[], Tensor]
"""Gives a tensor that has been begun, once it is there. To be called once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Coming:
    """What comes from other ranks. `sent` is kept until it has left."""

    received: Tensor
    sent: Tensor
    work: Sequence[dist.Work | None]

    def wait(self) -> Tensor:
        """`received`, once it is here. On a GPU the stream waits, not the host."""
        for each in self.work:
            # None: of a group that this rank is not in
            if each is not None:
                each.wait()
        return self.received


def there(x: Tensor) -> Begun:
    """What is there already."""
    return lambda: x


def all_to_all(
    received: Tensor, sent: Tensor, coming: Sequence[int], leaving: Sequence[int], group: dist.ProcessGroup
) -> Begun:
    """Begins to fill `received` [sum(coming), ...], end to end, with what each rank has for this one. Of `sent`
    [sum(leaving), ...], each rank gets so many rows.
    """
    if torch.compiler.is_compiling():
        # the compiler has no collective that is waited for later
        dist.all_to_all_single(received, sent, list(coming), list(leaving), group=group)
        return lambda: received
    work = dist.all_to_all_single(received, sent, list(coming), list(leaving), group=group, async_op=True)
    return Coming(received, sent, (work,)).wait
