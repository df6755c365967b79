"""Layerwise offload: the linear layers of blocks live in the host's memory, and are on the device for as long as their
block runs. The next block's are copied on a stream of their own meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from omni_grpc.config import OffloadConfig
from omni_grpc.features import Context
from omni_grpc.nn.linear import AnyLinear
from omni_grpc.nn.rows import Rows
from omni_grpc.nn.stack import Block, Carry, Run, Stack


def apply(module: nn.Module, config: OffloadConfig, context: Context) -> None:
    """Wraps every stack and the innermost linear layers of its blocks, before they get their weights: these go to the
    host one by one, so the device never holds them all.
    """
    for stack in [part for part in module.modules() if isinstance(part, Stack)]:
        blocks = [block for group in stack.groups for block in stack.group(group)]
        stack.wrap(Offload([_wrap(block, context.device) for block in blocks], context.device).around)


def _wrap(block: Block, device: torch.device) -> list[Offloaded]:
    """The layers that the block needs in a step. One that eats another stream than the block carries (the timestep's,
    a text's) works ahead of the steps, and fetches itself then.
    """
    needed = []
    for path, linear in list(block.named_modules()):
        if not isinstance(linear, AnyLinear) or any(isinstance(part, AnyLinear) for part in linear.children()):
            continue
        owner, _, leaf = path.rpartition(".")
        offloaded = Offloaded(linear, device)
        setattr(block.get_submodule(owner), leaf, offloaded)
        if linear.stream in block.carry:
            needed.append(offloaded)
    return needed


class Offloaded(AnyLinear):
    """A linear layer whose tensors are on the host. Its parameters are empty while it is not in use."""

    def __init__(self, base: AnyLinear, device: torch.device) -> None:
        super().__init__()
        self.base, self.device = base, device
        self.in_features, self.out_features, self.stream = base.in_features, base.out_features, base.stream
        self.host: dict[str, Tensor] = {}
        # prepare and step may need it at once
        self._lock = threading.RLock()
        self._depth = 0

    def forward(self, x: Tensor) -> Tensor:
        with self.present(None):
            out: Tensor = self.base(x)
            return out

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.base.shapes()

    def take(self, name: str, tensor: Tensor) -> None:
        self.base.take(name, tensor)
        for leaf, parameter in self.base.named_parameters():
            if parameter.numel() and not parameter.is_meta:
                self.host[leaf] = _to_host(parameter)
                self._put(leaf, parameter.new_empty(0))

    def fetch(self) -> dict[str, Tensor]:
        """Copies of all tensors on the device, made on the current stream."""
        return {leaf: tensor.to(self.device, non_blocking=True, copy=True) for leaf, tensor in self.host.items()}

    @contextlib.contextmanager
    def present(self, fetched: dict[str, Tensor] | None) -> Iterator[None]:
        """Makes the layer work in the block below, with tensors that were fetched or (None) fetches now."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                for leaf, tensor in (self.fetch() if fetched is None else fetched).items():
                    self._put(leaf, tensor)
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    for leaf, tensor in self.host.items():
                        self._put(leaf, tensor.new_empty(0, device=self.device))

    def _put(self, leaf: str, tensor: Tensor) -> None:
        path, _, name = leaf.rpartition(".")
        setattr(self.base.get_submodule(path), name, nn.Parameter(tensor, requires_grad=False))


def _to_host(parameter: Tensor) -> Tensor:
    """Where the device can read it while it computes: in pinned memory."""
    if parameter.device.type == "cpu":
        return parameter.detach()
    return torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True).copy_(parameter)


@dataclasses.dataclass(frozen=True, slots=True)
class Fetched:
    """The tensors of one block's layers, on the device once `arrived` (None: already)."""

    number: int
    tensors: list[dict[str, Tensor]]
    arrived: torch.cuda.Event | None


class Offload:
    """Runs a stack block by block; `blocks` are the layers that each needs. Two blocks at most are on the device: the
    one that computes, and the next one on its way.
    """

    def __init__(self, blocks: list[list[Offloaded]], device: torch.device) -> None:
        self.blocks = blocks
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: Fetched | None = None
        # a stack that is a part of prepare may be run by two lanes
        self._lock = threading.Lock()

    def around(self, run: Run) -> Run:
        return functools.partial(self.run, run)

    def run(self, inner: Run, stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        with self._lock:
            for number in range(lo, hi):
                here = self._arrived(number)
                # after the last block the first one, for the next step
                self._next = self._fetch((number + 1) % len(self.blocks))
                with contextlib.ExitStack() as present:
                    for layer, tensors in zip(self.blocks[number], here.tensors, strict=True):
                        present.enter_context(layer.present(tensors))
                    carry = inner(stack, number, number + 1, carry, rows)
        return carry

    def _fetch(self, number: int) -> Fetched:
        """Begins to copy a block. Its memory may be that of the block before, which is why the copy waits for all that
        has been launched; the block that is about to run is launched later, so the two overlap.
        """
        if self._copies is None:
            return Fetched(number, [layer.fetch() for layer in self.blocks[number]], None)
        self._copies.wait_stream(torch.cuda.current_stream(self._copies.device))
        with torch.cuda.stream(self._copies):
            tensors = [layer.fetch() for layer in self.blocks[number]]
            return Fetched(number, tensors, self._copies.record_event())

    def _arrived(self, number: int) -> Fetched:
        here, self._next = self._next, None
        if here is None or here.number != number:
            here = self._fetch(number)
        if here.arrived is not None and self._copies is not None:
            torch.cuda.current_stream(self._copies.device).wait_event(here.arrived)
        return here
