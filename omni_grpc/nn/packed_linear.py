"""PackedLinear: a linear layer whose weight stays as a file packs it, and is unpacked each time that it is used."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from omni_grpc.nn.linear import AnyLinear, Linear
from omni_grpc.ops.dequant import Packing, dequantize
from omni_grpc.ops.linear import linear


class Workspace:
    """Where layers unpack their weights, one after the other: as large as the largest of them, for all."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._least = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        # prepare and step have lanes of their own
        self._lock = threading.Lock()

    def expect(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Says of a matrix that will be asked for: there is memory for it from the first one on, and it stays where it
        is, for a graph that was captured.
        """
        self._least = max(self._least, rows * columns * dtype.itemsize)

    @contextlib.contextmanager
    def matrix(self, rows: int, columns: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """[rows, columns] of anything, for the block below alone. On a GPU what the block began may still read it: what
        follows on the same stream waits by itself.
        """
        size = rows * columns * dtype.itemsize
        with self._lock:
            if self._memory.nbytes < size:
                # the old one goes first, so that there are never two
                self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
                with torch.inference_mode(False):
                    self._memory = torch.empty(max(size, self._least), dtype=torch.uint8, device=self.device)
            yield self._memory[:size].view(dtype).view(rows, columns)


class PackedLinear(AnyLinear):
    """x W^T + b with W [out, in] as `runs` of rows, each in a packing of its own: packed uint8 [bytes], run after run.

    It computes what `Linear` computes with the unpacked weight in the dtype of x.
    """

    def __init__(
        self, linear: Linear, runs: Sequence[tuple[Packing, int]], dtype: torch.dtype, workspace: Workspace
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.stream = linear.in_features, linear.out_features, linear.stream
        self.runs, self.dtype, self.workspace = tuple(runs), dtype, workspace
        workspace.expect(self.out_features, self.in_features, dtype)
        size = sum(packing.bytes_of(rows * self.in_features) for packing, rows in self.runs)
        packed = linear.weight.new_empty(size, dtype=torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The unpacked weight, in memory of its own: models ask their layers for dtype and device."""
        shape = self.out_features, self.in_features
        return self._unpack(torch.empty(shape, dtype=self.dtype, device=self.packed.device))

    def forward(self, x: Tensor) -> Tensor:
        with self.workspace.matrix(self.out_features, self.in_features, x.dtype) as weight:
            return linear(x, self._unpack(weight), self.bias)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.out_features, self.in_features)} | (
            {} if self.bias is None else {"bias": (self.out_features,)}
        )

    def take(self, name: str, tensor: Tensor) -> None:
        """The weight comes as it is packed, uint8 [bytes]."""
        if name == "weight":
            assert tensor.dtype == torch.uint8, "unpacked"
            assert tensor.shape == self.packed.shape, "of another size"
            name = "packed"
        setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    def _unpack(self, out: Tensor) -> Tensor:
        row, at = 0, 0
        for packing, rows in self.runs:
            size = packing.bytes_of(rows * self.in_features)
            dequantize(self.packed[at : at + size], packing, out[row : row + rows])
            row, at = row + rows, at + size
        return out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {'+'.join(packing.name for packing, _ in self.runs)}"
