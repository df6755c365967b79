"""PackedLinear: a linear layer whose weight stays packed as in its file, and is dequantized whenever it is used."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from omni_grpc.nn.linear import AnyLinear, Linear, in_float32
from omni_grpc.ops.dequant import Packing, dequantize
from omni_grpc.ops.linear import linear


class Workspace:
    """The buffer into which layers dequantize their weights, one after the other. It is as large as the largest of
    them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._least = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        # prepare and step have lanes of their own
        self._lock = threading.Lock()

    def expect(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Announces a matrix that will be asked for. Memory for it is then allocated once and keeps its address, as a
        captured graph needs it.
        """
        self._least = max(self._least, rows * columns * dtype.itemsize)

    @contextlib.contextmanager
    def matrix(self, rows: int, columns: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """An uninitialized matrix [rows, columns], valid inside the `with` block. On a GPU, kernels launched in the
        block may read it later: work on the same stream is ordered.
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
    """x W^T + b with W [out, in] as `runs` of rows with the same packing: packed uint8 [bytes], run after run. It
    computes what `Linear` computes with the dequantized weight in the dtype of x.
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
        """The dequantized weight, in memory of its own: models ask their layers for dtype and device."""
        shape = self.out_features, self.in_features
        return self._unpack(torch.empty(shape, dtype=self.dtype, device=self.packed.device))

    def full_precision(self) -> tuple[Tensor, Tensor | None]:
        """float32 [out, in] and [out]."""
        weight = torch.empty(self.out_features, self.in_features, device=self.packed.device)
        return self._unpack(weight), None if self.bias is None else in_float32(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]. The weight is dequantized to x's dtype in the shared workspace."""
        with self.workspace.matrix(self.out_features, self.in_features, x.dtype) as weight:
            return linear(x, self._unpack(weight), self.bias)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.out_features, self.in_features)} | (
            {} if self.bias is None else {"bias": (self.out_features,)}
        )

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        """The weight comes in its packing, uint8 [bytes]."""
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
