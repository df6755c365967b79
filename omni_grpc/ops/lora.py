"""The lora family: what low-rank adapters add to the output of a linear layer, for all tokens of a batch at once.

Shapes: T packed tokens, K inputs and N outputs of the layer. A run is some adjacent tokens with the same adapters; a
part is what one adapter adds to adjacent outputs: scale * up [n, r] @ down [r, K], or scale * a vector [n].
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_grpc.ops.declare import op
from omni_grpc.ops.library import kernels_on
from omni_grpc.ops.quant import gelu_tanh

RUN, PART = 3, 3
"""Numbers in the op's flat lists of a run: first token, tokens, parts; of a part: down (-1: none), up, first output."""

UNPROVEN = "OMNI_UNPROVEN_KERNELS"
"""Variable that lets GPUs use the kernels of this family; see `on_gpu`."""

CODES = frozenset({torch.float8_e4m3fn, torch.int8})

MOST_RUNS, MOST_PARTS = 28, 64
"""Runs and parts of one launch, as csrc/common/lora.h has them. The binding launches as often as it takes; a single run
with more parts is for the reference.
"""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoraPlan:
    """What a batch adds to one layer, as the op takes it: see `lora_add_op`. Lists are made once and used at each step.

    fits: whether kernels take so many parts.
    """

    factors: list[Tensor]
    runs: list[int]
    parts: list[int]
    scales: list[float]
    fits: bool = True

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int, Sequence[tuple[Tensor | None, Tensor, int, float]]]]) -> LoraPlan:
        """runs: (first token, tokens, parts), in order; a part is (down [r, K], up [n, r], first output, scale), or
        (None, vector [n], first output, scale).
        """
        factors: dict[int, Tensor] = {}
        places: dict[int, int] = {}

        def place(factor: Tensor) -> int:
            factors[id(factor)] = factor
            return places.setdefault(id(factor), len(places))

        flat = [
            (-1 if down is None else place(down), place(up), first, scale)
            for _, _, parts in runs
            for down, up, first, scale in parts
        ]
        return cls(
            list(factors.values()),
            [number for first, tokens, parts in runs for number in (first, tokens, len(parts))],
            [number for part in flat for number in part[:3]],
            [part[3] for part in flat],
            max((len(parts) for _, _, parts in runs), default=0) <= MOST_PARTS,
        )


def lora_add(y: Tensor, x: Tensor, scale: Tensor | None, plan: LoraPlan, gelu: bool = False) -> None:
    """`lora_add_op` with the lists of a plan: y [T, N] is changed in place."""
    add = lora_add_op if plan.fits else lora_add_op.reference
    add(y, x, scale, plan.factors, plan.runs, plan.parts, plan.scales, gelu)


@functools.cache
def on_gpu() -> bool:
    """Whether the kernels for CUDA serve. They compile, and no GPU has run them yet: until one has, with what
    tools/gpu_test.py and tools/sanitize.py check, GPUs compute by the references, unless the variable UNPROVEN is 1.
    """
    return os.environ.get(UNPROVEN) == "1"


def _served(y: Tensor) -> bool:
    """On CUDA the kernels multiply in bfloat16 alone. They write to rows whose elements are neighbours."""
    dtypes = (torch.bfloat16,) if y.is_cuda else (torch.bfloat16, torch.float32)
    return y.dtype in dtypes and y.stride(-1) == 1 and (on_gpu() or not y.is_cuda)


def _fake(
    y: Tensor,
    x: Tensor,
    scale: Tensor | None,
    factors: Sequence[Tensor],
    runs: Sequence[int],
    parts: Sequence[int],
    scales: Sequence[float],
    gelu: bool = False,
) -> None:
    _check(y, x, scale, factors, runs, parts, scales)


@op(kernel_if=_served, of=("y",), fake=_fake, mutates=("y",))
def lora_add_op(
    y: Tensor,
    x: Tensor,
    scale: Tensor | None,
    factors: Sequence[Tensor],
    runs: Sequence[int],
    parts: Sequence[int],
    scales: Sequence[float],
    gelu: bool = False,
) -> None:
    """y += the parts of each token's run, then GELU (tanh) of all of y if `gelu`.

    y: [T, N]. x: [T, K] in y's dtype, or its codes in float8 e4m3 or int8 with `scale` float32 [T], one for each token.
    factors: downs [r, K], ups [n, r] and vectors [n] in y's dtype.
    runs: (first token, tokens, parts) of each, in the order of their tokens, which do not overlap.
    parts: those of the runs one after the other, each (down, up, first output): the first two are indices in `factors`,
    and down is -1 where up is a vector. scales: one for each part.
    Tokens of no run get GELU alone, and without it they are left to the bit, as are those of runs without parts.
    A token's result does not depend on other tokens. Raises RuntimeError where shapes, dtypes or devices disagree or a
    run lies outside of y. Kernels sum in float32 and round once: on CUDA bfloat16, on a CPU float32 as well.
    """
    _check(y, x, scale, factors, runs, parts, scales)
    at = 0
    for run in range(0, len(runs), RUN):
        first, tokens, count = runs[run : run + RUN]
        here = slice(first, first + tokens)
        if count and tokens:
            inputs = x[here] if scale is None else (x[here].float() * scale[here, None]).to(y.dtype)
        for part in range(at, at + count if tokens else at):
            down, up, row = parts[PART * part : PART * (part + 1)]
            factor = factors[up]
            outputs = y[here, row : row + factor.shape[0]]
            change = factor if down < 0 else F.linear(F.linear(inputs, factors[down]), factor)
            outputs.add_(change, alpha=scales[part])
        at += count
    if gelu:
        y.copy_(gelu_tanh(y))


def lora_merge(weight: Tensor, plan: LoraPlan) -> Tensor:
    """`lora_merge_op` with the lists of a plan of one run: weight [N, K] -> [N, K]."""
    merge = lora_merge_op if plan.fits else lora_merge_op.reference
    return merge(weight, plan.factors, plan.parts, plan.scales)


def merges(weight: Tensor) -> bool:
    """Whether a kernel serves `lora_merge` of a weight [N, K]. The reference takes longer than it spares."""
    return on_gpu() and _merged_by_kernel(weight) and _has_merge_kernel()


@functools.cache
def _has_merge_kernel() -> bool:
    return "lora_merge" in kernels_on("cuda")


def _merged_by_kernel(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype == torch.bfloat16


@op(kernel_if=_merged_by_kernel, of=("weight",))
def lora_merge_op(weight: Tensor, factors: Sequence[Tensor], parts: Sequence[int], scales: Sequence[float]) -> Tensor:
    """The weight [N, K] of a layer to which all tokens add the same: weight + scale * up @ down of each part.

    factors, parts and scales as `lora_add_op` takes them, without vectors. Rounded once; the kernel, for bfloat16 on
    CUDA, rounds scale * up before. Raises RuntimeError where shapes, dtypes or devices disagree.
    """
    torch._check(weight.dim() == 2, lambda: f"lora_merge: weight must be [N, K], got {weight.dim()} dimensions")
    torch._check(
        all(each.dtype == weight.dtype and each.device == weight.device for each in factors),
        lambda: "lora_merge: factors must be on the device of weight, in its dtype",
    )
    torch._check(
        len(parts) == PART * len(scales),
        lambda: f"lora_merge: {len(parts)} numbers of parts and {len(scales)} scales do not match",
    )
    outputs, inputs = weight.shape
    merged = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    for part, scale in enumerate(scales):
        down, up, row = parts[PART * part : PART * (part + 1)]
        torch._check(
            0 <= down < len(factors)
            and 0 <= up < len(factors)
            and row >= 0
            and _fits(factors, down, up, inputs, outputs - row),
            lambda part=part: f"lora_merge: part {part} does not fit {inputs} inputs and {outputs} outputs",
        )
        height = factors[up].shape[0]
        merged[row : row + height].addmm_(factors[up].to(merged.dtype), factors[down].to(merged.dtype), alpha=scale)
    return merged.to(weight.dtype)


def _check(
    y: Tensor,
    x: Tensor,
    scale: Tensor | None,
    factors: Sequence[Tensor],
    runs: Sequence[int],
    parts: Sequence[int],
    scales: Sequence[float],
) -> None:
    torch._check(
        y.dim() == 2 and x.dim() == 2 and y.shape[0] == x.shape[0],
        lambda: f"lora_add: y and x must be [T, N] and [T, K], got {tuple(y.shape)} and {tuple(x.shape)}",
    )
    torch._check(
        x.dtype == y.dtype if scale is None else x.dtype in CODES,
        lambda: f"lora_add: x must be of y's dtype, or float8 e4m3 or int8 with a scale; it is {x.dtype}",
    )
    torch._check(
        scale is None or (scale.dtype == torch.float32 and tuple(scale.shape) == (x.shape[0],)),
        lambda: "lora_add: scale must be float32 [T]",
    )
    torch._check(
        all(each.dtype == y.dtype and each.device == y.device for each in factors) and x.device == y.device,
        lambda: "lora_add: x and factors must be on the device of y, factors in its dtype",
    )
    torch._check(
        len(runs) % RUN == 0 and len(parts) == PART * len(scales) and sum(runs[2::RUN]) == len(scales),
        lambda: f"lora_add: {len(runs)} numbers of runs, {len(parts)} of parts and {len(scales)} scales do not match",
    )
    end = 0
    for run in range(0, len(runs), RUN):
        first, tokens, count = runs[run : run + RUN]
        torch._check(
            end <= first and tokens >= 0 and first + tokens <= y.shape[0] and count >= 0,
            lambda run=run: (
                f"lora_add: run {run // RUN} lies outside of {y.shape[0]} tokens, or before the end of another"
            ),
        )
        end = first + tokens
    for part in range(len(scales)):
        down, up, row = parts[PART * part : PART * (part + 1)]
        torch._check(
            -1 <= down < len(factors)
            and 0 <= up < len(factors)
            and row >= 0
            and _fits(factors, down, up, x.shape[1], y.shape[1] - row),
            lambda part=part: f"lora_add: part {part} does not fit {x.shape[1]} inputs and {y.shape[1]} outputs",
        )


def _fits(factors: Sequence[Tensor], down: int, up: int, inputs: int, outputs: int) -> bool:
    shape = factors[up].shape
    if down < 0:
        return len(shape) == 1 and shape[0] <= outputs
    return len(shape) == 2 and shape[0] <= outputs and tuple(factors[down].shape) == (shape[1], inputs)
