"""The parts of one layer in a file: reading one number, one factor, or two of them, and what is wrong with them."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_grpc.loading.adapters.keys import Entry


class NotServed(Exception):
    """A change that cannot be made; the text says why, and what would work."""


class Malformed(Exception):
    """Tensors that are no such change; the text says why."""


def number(entry: Entry, part: str) -> float:
    """A tensor of one value."""
    if (count := entry.tensors[part].numel()) != 1:
        raise Malformed(f"{entry.keys[part]} has {count} values; {part} is one number for a layer")
    return float(entry.tensors[part].item())


def vector(entry: Entry, part: str) -> Tensor:
    """float32 [channels]."""
    if entry.tensors[part].dim() != 1:
        raise Malformed(f"{entry.keys[part]} is {tuple(entry.tensors[part].shape)}; it has to have one dimension")
    return entry.tensors[part].float()


def matrix(entry: Entry, part: str) -> Tensor:
    """float32 [rows, columns]: a kernel of patches that do not overlap is one row for each of them."""
    whole = entry.tensors[part].float()
    return whole.flatten(1) if whole.dim() > 1 else whole[:, None]


def factor(entry: Entry, part: str) -> Tensor:
    """float32, of any shape."""
    if part not in entry.tensors:
        raise Malformed(f"{entry.layer} has one factor of two, and no {part}")
    return entry.tensors[part].float()


def product(entry: Entry, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """down [r, in] and up [out, r] as matrices."""
    rank = down.shape[0] if down.dim() else 0
    found = f"{entry.layer}: factors {tuple(up.shape)} and {tuple(down.shape)}"
    if rank and down.dim() > 2 and up.dim() > 2 and up[0, 0].numel() == 1:
        # a convolution of patches that do not overlap is a product with the patch in one row
        down, up = down.flatten(1), up.flatten(1)
    if down.dim() != 2 or up.dim() != 2 or rank == 0 or up.shape[1] != rank:
        raise Malformed(f"{found} have no product")
    return down, up


def tucker(entry: Entry, core: str, left: Tensor, right: Tensor) -> Tensor:
    """The kernel [p, q, ...] of core [i, j, ...], left [i, p] and right [j, q], as LyCORIS decomposes convolutions."""
    middle = factor(entry, core)
    left, right = left.flatten(1), right.flatten(1)
    if middle.dim() < 3 or middle.shape[:2] != (left.shape[0], right.shape[0]):
        shapes = ", ".join(str(tuple(part.shape)) for part in (middle, left, right))
        raise Malformed(f"{entry.keys[core]} does not fit its factors: {shapes}")
    return torch.einsum("i j ..., i p, j q -> p q ...", middle, left, right)
