"""Layerwise offload: the linear layers of blocks live in the host's memory, and are on the device only while their
block runs.

The weights of a block are one range of bytes on the host. It is copied at once, while the block before computes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from omni_grpc.config import OffloadConfig
from omni_grpc.features import Context
from omni_grpc.nn.linear import AnyLinear, Linear
from omni_grpc.nn.rows import Rows
from omni_grpc.nn.stack import Block, Carry, RunBlocks, Stack
from omni_grpc.ops.host import ALIGNMENT, Region, Streamer, cut, streamer

SLOTS = 2
"""Blocks on the device at a time: one computes, the next one is being copied."""
WIDEST = 4
"""Bytes per element, at most. A region reserves this much for each layer, whatever dtype its weight ends up in."""


def apply(module: nn.Module, config: OffloadConfig, context: Context) -> None:
    """Wraps every stack and the innermost linear layers of its blocks, before they get their weights: each goes to the
    host as it is loaded, so the device never holds all of them. `layerwise_resident_blocks` blocks of each stack stay
    on the device.
    """
    for stack in [part for part in module.modules() if isinstance(part, Stack)]:
        blocks = [block for group in stack.groups for block in stack.group(group)]
        resident = _evenly_spaced(config.layerwise_resident_blocks, len(blocks))
        packs = [_pack(block, context.device, resident=number in resident) for number, block in enumerate(blocks)]
        offload = Offload(packs, context.device)
        stack.wrap(offload.around)
        context.effects.on_sleep.append(offload.close)


def _evenly_spaced(count: int, blocks: int) -> frozenset[int]:
    """`count` of the blocks, evenly spaced: while a resident block computes, the next one has more time to arrive."""
    count = min(count, blocks)
    return frozenset((2 * number + 1) * blocks // (2 * count) for number in range(count))


def _pack(block: Block, device: torch.device, *, resident: bool) -> Pack | None:
    """The layers that the block needs in a step; None where they stay on the device. A layer of a stream that the block
    does not carry (the timestep, a text) runs ahead of the steps, and fetches its weights when it is called.
    """
    layers = {
        path: part
        for path, part in block.named_modules()
        if isinstance(part, AnyLinear) and not any(isinstance(inner, AnyLinear) for inner in part.children())
    }
    needed = {path: linear for path, linear in layers.items() if linear.stream in block.carry}
    ahead = {path: linear for path, linear in layers.items() if path not in needed}
    _wrap(block, ahead, _region(ahead.values()), device)
    if resident:
        return None
    region = _region(needed.values())
    return Pack(_wrap(block, needed, region, device), region, device)


def _region(layers: Iterable[AnyLinear]) -> Region:
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    return Region(sum(WIDEST * parameter.numel() + ALIGNMENT for parameter in parameters))


def _wrap(block: Block, layers: Mapping[str, AnyLinear], region: Region, device: torch.device) -> list[Offloaded]:
    wrapped = []
    for path, linear in layers.items():
        owner, _, leaf = path.rpartition(".")
        offloaded = Offloaded(linear, region, device)
        setattr(block.get_submodule(owner), leaf, offloaded)
        wrapped.append(offloaded)
    return wrapped


class Offloaded(AnyLinear):
    """A linear layer whose tensors are on the host, in a region. Its parameters are empty while it is not in use."""

    def __init__(self, base: AnyLinear, region: Region, device: torch.device) -> None:
        super().__init__()
        self.base, self.region, self.device = base, region, device
        self.in_features, self.out_features, self.stream = base.in_features, base.out_features, base.stream
        self.host: dict[str, Tensor] = {}
        # the parameters will be empty
        self._shapes = base.shapes()
        self._empty: dict[str, nn.Parameter] = {}
        # prepare and step may need it at once
        self._lock = threading.RLock()
        self._depth = 0

    @property
    def activation_dtype(self) -> torch.dtype | None:
        return self.base.activation_dtype

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]. Copies the parameters to the device first, unless they are there."""
        with self.present(None):
            out: Tensor = self.base(x)
            return out

    def gelu(self, x: Tensor) -> Tensor:
        """GELU (tanh) of `self(x)`, [T, in] -> [T, out]. Copies the parameters to the device first, like `forward`."""
        with self.present(None):
            return self.base.gelu(x)

    def full_precision(self) -> tuple[Tensor, Tensor | None]:
        """Those of the layer inside, float32 [out, in] and [out], on the device."""
        with self.present(None):
            return self.base.full_precision()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def staging_buffer(self, name: str, dtype: torch.dtype) -> Tensor | None:
        # others make something else of what they take
        return self.region.take(self._shapes[name], dtype) if type(self.base) is Linear else None

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """Loads weight [out, in] or bias [out] into the wrapped layer, and moves its parameters to the host region."""
        self.base.load_tensor(name, tensor)
        self._move()

    def load_columns(self, name: str, tensor: Tensor, kept: Sequence[slice]) -> None:
        """The same with some inputs of a weight [out, in]."""
        self.base.load_columns(name, tensor, kept)
        self._move()

    def _move(self) -> None:
        for leaf, parameter in self.base.named_parameters():
            if parameter.numel() and not parameter.is_meta:
                self.host[leaf] = self._kept(parameter)
                self._empty[leaf] = _parameter(torch.empty(0, dtype=parameter.dtype, device=self.device))
                self.put(leaf, self._empty[leaf])

    def _kept(self, parameter: Tensor) -> Tensor:
        if self.region.offset(parameter) is not None:
            return parameter.detach()
        return self.region.take(parameter.shape, parameter.dtype).copy_(parameter)

    def fetch(self) -> dict[str, nn.Parameter]:
        """Copies of all its tensors to the device, on the current stream."""
        self.region.pin(self.device)
        return {
            leaf: _parameter(tensor.to(self.device, non_blocking=True, copy=True)) for leaf, tensor in self.host.items()
        }

    @contextlib.contextmanager
    def present(self, fetched: Mapping[str, nn.Parameter] | None) -> Iterator[None]:
        """Makes the layer usable inside the `with` block, with parameters that were fetched already or (None) are
        fetched now.
        """
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                for leaf, parameter in (self.fetch() if fetched is None else fetched).items():
                    self.put(leaf, parameter)
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    for leaf, empty in self._empty.items():
                        self.put(leaf, empty)

    def put(self, leaf: str, parameter: nn.Parameter) -> None:
        path, _, name = leaf.rpartition(".")
        setattr(self.base.get_submodule(path), name, parameter)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Pack:
    """The layers that one block needs, in one region of host memory. `views` are their parameters in each of the slots
    on the device.
    """

    def __init__(self, layers: list[Offloaded], region: Region, device: torch.device) -> None:
        self.layers, self.region, self.device = layers, region, device
        self.views: list[list[dict[str, nn.Parameter]]] = []

    @property
    def source(self) -> Tensor:
        return self.region.whole

    def place(self, slots: Sequence[Tensor]) -> None:
        """Makes views of the layers' parameters in each slot, uint8 [bytes], at their offsets in the region."""
        self.views = [
            [
                {leaf: _parameter(cut(slot, self._offset(x), x.shape, x.dtype)) for leaf, x in layer.host.items()}
                for layer in self.layers
            ]
            for slot in slots
        ]

    def _offset(self, tensor: Tensor) -> int:
        offset = self.region.offset(tensor)
        assert offset is not None
        return offset

    @contextlib.contextmanager
    def present(self, slot: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for layer, views in zip(self.layers, self.views[slot], strict=True):
                stack.enter_context(layer.present(views))
            yield


class Offload:
    """Runs a stack block by block. `packs` has an entry for each block, None for one that stays on the device."""

    def __init__(self, packs: list[Pack | None], device: torch.device) -> None:
        self.packs, self.device = packs, device
        self.coming = [number for number, pack in enumerate(packs) if pack is not None]
        # the block that each slot has or gets
        self.slots: list[int | None] = []
        self._memory: list[Tensor] = []
        self._streamer: Streamer | None = None
        # a stack that is a part of prepare may be run by two lanes
        self._lock = threading.Lock()

    def around(self, run: RunBlocks) -> RunBlocks:
        return functools.partial(self.run, run)

    def run(self, inner: RunBlocks, stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        with self._lock:
            copies = self._streamer or self._open()
            for number in range(lo, hi):
                pack = self.packs[number]
                self._fetch(self._upcoming(number)[:SLOTS], copies)
                if pack is None:
                    carry = inner(stack, number, number + 1, carry, rows)
                    continue
                slot = self.slots.index(number)
                copies.wait(slot)
                try:
                    with pack.present(slot):
                        carry = inner(stack, number, number + 1, carry, rows)
                finally:
                    copies.release(slot)
        return carry

    def _upcoming(self, number: int) -> list[int]:
        """The offloaded blocks in the order in which they are needed, from `number` on; after the last block comes the
        first one, for the next step.
        """
        return [n for n in self.coming if n >= number] + [n for n in self.coming if n < number]

    def _fetch(self, numbers: Sequence[int], copies: Streamer) -> None:
        """Starts to copy those of the blocks that are in no slot, each into a slot whose block is not among them."""
        for number in numbers:
            if number not in self.slots:
                slot = next(slot for slot, held in enumerate(self.slots) if held is None or held not in numbers)
                pack = self.packs[number]
                assert pack is not None
                # unknown until it is there: what fails half way is copied again
                self.slots[slot] = None
                copies.copy(slot, self._memory[slot][: pack.source.nbytes], pack.source)
                self.slots[slot] = number

    def close(self) -> None:
        """Frees the slots. The next run takes them again, and copies into them what it needs."""
        with self._lock:
            self._streamer, self._memory, self.slots = None, [], []
            for pack in self.packs:
                if pack is not None:
                    pack.views = []

    def _open(self) -> Streamer:
        """Pins the host memory and allocates the slots."""
        packs = [pack for pack in self.packs if pack is not None]
        for pack in packs:
            pack.region.pin(self.device)
        count = min(SLOTS, len(packs))
        size = max((pack.region.used for pack in packs), default=0)
        self._memory = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(count)]
        for pack in packs:
            pack.place(self._memory)
        self.slots = [None] * count
        self._streamer = copies = streamer(self.device, max(count, 1))
        # the slots may lie where something still runs
        for slot in range(count):
            copies.release(slot)
        return copies
