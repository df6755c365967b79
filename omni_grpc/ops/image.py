"""The image family: from decoded pixels, or from latents as a preview, to 8-bit images in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omni_grpc.ops.declare import KERNEL_DTYPES, has_kernel_dtype, op

MOST_CHANNELS = 256
"""The most channels of latents that the kernels take."""


def _pixels_fake(pixels: Tensor) -> tuple[Tensor, Tensor]:
    _check_pixels(pixels)
    count, _, height, width = pixels.shape
    return pixels.new_empty((count, height, width, 3), dtype=torch.uint8), pixels.new_empty(1, dtype=torch.int32)


@op(kernel_if=has_kernel_dtype, of=("pixels",), fake=_pixels_fake)
def pixels_to_bytes(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels in -1..1 as bytes: round(255 * clip(pixels / 2 + 1 / 2)), half to even.

    pixels: [N, 3, height, width]; the unit interval is computed in its dtype, as decoders' own processors do, the rest
    in float32. Returns uint8 [N, height, width, 3], and how many values are not finite, int32 [1]; of those the bytes
    are 0 or 255. Raises RuntimeError for another shape or dtype. A kernel serves float32 and bfloat16, the reference
    everything else.
    """
    _check_pixels(pixels)
    unit = (pixels * 0.5 + 0.5).clamp(0, 1).float().nan_to_num(0.0)
    nonfinite = pixels.isfinite().logical_not_().sum(dtype=torch.int32).view(1)
    return (unit * 255).round().to(torch.uint8).movedim(1, -1).contiguous(), nonfinite


def _latents_fake(latents: Tensor, factors: Sequence[float], bias: Sequence[float]) -> Tensor:
    _check_latents(latents, factors, bias)
    return latents.new_empty((*latents.shape[1:], 3), dtype=torch.uint8)


def _has_kernel(latents: Tensor) -> bool:
    return latents.dtype in KERNEL_DTYPES and latents.shape[0] <= MOST_CHANNELS


@op(kernel_if=_has_kernel, of=("latents",), fake=_latents_fake)
def latents_to_bytes(latents: Tensor, factors: Sequence[float], bias: Sequence[float]) -> Tensor:
    """A linear map of latents to colors in -1..1, as bytes: NaN is black.

    latents: [C, height, width]. factors: 3 C of them, those of a channel side by side. bias: 3. Returns uint8 [height,
    width, 3], computed in float32. Raises RuntimeError where sizes disagree. A kernel serves float32 and bfloat16 of
    up to 256 channels, the reference everything else.
    """
    _check_latents(latents, factors, bias)
    math = torch.promote_types(latents.dtype, torch.float32)
    matrix, offset = (torch.tensor(values, device=latents.device, dtype=math) for values in (factors, bias))
    colors = torch.einsum("chw,cr->hwr", latents.to(math), matrix.view(-1, 3)) + offset
    unit = (colors / 2 + 0.5).nan_to_num(0.0).clamp(0, 1)
    return (unit * 255).round().to(torch.uint8).contiguous()


def _check_pixels(pixels: Tensor) -> None:
    torch._check(
        pixels.dim() == 4 and pixels.shape[1] == 3 and pixels.is_floating_point(),
        lambda: f"pixels_to_bytes: pixels must be [N, 3, height, width], got {pixels.dtype} {tuple(pixels.shape)}",
    )


def _check_latents(latents: Tensor, factors: Sequence[float], bias: Sequence[float]) -> None:
    torch._check(
        latents.dim() == 3,
        lambda: f"latents_to_bytes: latents must be [C, height, width], got {latents.dim()} dimensions",
    )
    torch._check(
        len(factors) == 3 * latents.shape[0] and len(bias) == 3,
        lambda: (
            f"latents_to_bytes: {latents.shape[0]} channels take {3 * latents.shape[0]} factors and a bias of 3, got "
            f"{len(factors)} and {len(bias)}"
        ),
    )
