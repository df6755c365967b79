"""Checks that all ops over queries, keys and values of packed rows share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def check_packed(op: str, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    """q: [Tq, H, D]. k, v: [Tk, K, D], H a multiple of K. cu_q, cu_k: int32 [R + 1]. RuntimeError, by name, for
    anything else.
    """
    if not _fits(q, k, v, cu_q, cu_k):
        _check(op, q, k, v, cu_q, cu_k)


def _fits(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> bool:
    """The same checks as `_check` at a third of its host time, for tensors whose sizes are plain numbers."""
    return (
        q.ndim == 3
        and k.ndim == 3
        and k.shape == v.shape
        and q.shape[2] == k.shape[2]
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
        and q.dtype == k.dtype == v.dtype
        and cu_q.dtype == cu_k.dtype == torch.int32
        and cu_q.ndim == 1
        and cu_q.shape == cu_k.shape
    )


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    _require(
        q.dim() == 3 and k.dim() == 3 and v.dim() == 3,
        lambda: f"{op}: q, k, v must be [T, H, D], got {q.dim()}, {k.dim()} and {v.dim()} dimensions",
    )
    _require(
        k.shape == v.shape, lambda: f"{op}: k is {tuple(k.shape)} and v {tuple(v.shape)}; they must have the same shape"
    )
    _require(q.shape[2] == k.shape[2], lambda: f"{op}: head sizes differ: q {q.shape[2]}, k {k.shape[2]}")
    _require(
        k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0,
        lambda: f"{op}: {q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads",
    )
    _require(q.dtype == k.dtype and q.dtype == v.dtype, lambda: f"{op}: q, k and v must have the same dtype")
    _require(
        cu_q.dtype == torch.int32 and cu_k.dtype == torch.int32 and cu_q.dim() == 1 and cu_k.shape == cu_q.shape,
        lambda: f"{op}: cu_q and cu_k must be int32 and of the same length",
    )


def _require(condition: Any, message: Callable[[], str]) -> None:
    """torch._check for symbolic sizes only: it costs microseconds even where the condition holds."""
    if condition is not True:
        torch._check(condition, message)
