"""The image family: from what decoders and denoisers make to bytes that can be seen, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omni_grpc.ops.library import declare

KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16})
MOST_CHANNELS = 256
"""Of latents, that the kernels take."""


def pixels_to_bytes(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels in -1..1 as bytes: round(255 * clip(pixels / 2 + 1 / 2)), half to even.

    pixels: [N, 3, height, width]; the unit interval is computed in its dtype, as decoders' own processors do, the rest
    in float32. Returns uint8 [N, height, width, 3], and how many values are not finite, int32 [1]; of those the bytes
    are 0 or 255. Raises RuntimeError for another shape or dtype. A kernel serves float32 and bfloat16, the reference
    everything else.
    """
    op = _pixels_to_bytes if pixels.dtype in KERNEL_DTYPES else pixels_to_bytes_reference
    made: tuple[Tensor, Tensor] = op(pixels)
    return made


def pixels_to_bytes_reference(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of `pixels_to_bytes`."""
    _check_pixels(pixels)
    unit = (pixels * 0.5 + 0.5).clamp(0, 1).float().nan_to_num(0.0)
    odd = pixels.isfinite().logical_not_().sum(dtype=torch.int32).view(1)
    return (unit * 255).round().to(torch.uint8).movedim(1, -1).contiguous(), odd


def latents_to_bytes(latents: Tensor, factors: Sequence[float], bias: Sequence[float]) -> Tensor:
    """A linear map of latents to colours in -1..1, as bytes: what is no number is black.

    latents: [C, height, width]. factors: 3 C of them, those of a channel side by side. bias: 3. Returns uint8 [height,
    width, 3], computed in float32. Raises RuntimeError where sizes disagree. A kernel serves float32 and bfloat16 of
    up to 256 channels, the reference everything else.
    """
    served = latents.dtype in KERNEL_DTYPES and latents.shape[0] <= MOST_CHANNELS
    op = _latents_to_bytes if served else latents_to_bytes_reference
    made: Tensor = op(latents, list(factors), list(bias))
    return made


def latents_to_bytes_reference(latents: Tensor, factors: Sequence[float], bias: Sequence[float]) -> Tensor:
    """The definition of `latents_to_bytes`."""
    _check_latents(latents, factors, bias)
    math = torch.promote_types(latents.dtype, torch.float32)
    matrix, offset = (torch.tensor(values, device=latents.device, dtype=math) for values in (factors, bias))
    colours = torch.einsum("chw,cr->hwr", latents.to(math), matrix.view(-1, 3)) + offset
    unit = (colours / 2 + 0.5).nan_to_num(0.0).clamp(0, 1)
    return (unit * 255).round().to(torch.uint8).contiguous()


def _pixels_to_bytes_fake(pixels: Tensor) -> tuple[Tensor, Tensor]:
    _check_pixels(pixels)
    count, _, height, width = pixels.shape
    return pixels.new_empty((count, height, width, 3), dtype=torch.uint8), pixels.new_empty(1, dtype=torch.int32)


def _latents_to_bytes_fake(latents: Tensor, factors: Sequence[float], bias: Sequence[float]) -> Tensor:
    _check_latents(latents, factors, bias)
    return latents.new_empty((*latents.shape[1:], 3), dtype=torch.uint8)


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


_pixels_to_bytes = declare(
    "pixels_to_bytes(Tensor pixels) -> (Tensor, Tensor)",
    reference=pixels_to_bytes_reference,
    fake=_pixels_to_bytes_fake,
)
_latents_to_bytes = declare(
    "latents_to_bytes(Tensor latents, float[] factors, float[] bias) -> Tensor",
    reference=latents_to_bytes_reference,
    fake=_latents_to_bytes_fake,
)
