"""The filter of SeaCache (https://huggingface.co/papers/2602.18993): a Wiener filter for what a picture adds to noise,
by spatial frequency.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from omni_grpc.pipeline.patches import Grid


def filtered(signal: Tensor, grid: Grid, sigma: float, power: float) -> Tensor:
    """The tokens [T, C] of a grid, T = frames * height * width, frame by frame and row by row, with each frequency f
    multiplied by g(f) = (1 - sigma) P / ((1 - sigma)^2 P + sigma^2). P = |f|^-power is the power of a picture, sigma
    the share of noise, and g the gain that recovers the picture best. Axis by axis, each divided by the mean of its
    gains, so that sizes of steps compare. Returns float32 [T, C].
    """
    shape = (grid.frames, grid.height, grid.width)
    x = signal.float().view(*shape, -1)
    for axis, length in enumerate(shape):
        if length > 1:
            gain = _gain(length, round(sigma, 6), power, x.device).view(
                [-1 if axis == each else 1 for each in range(4)]
            )
            x = torch.fft.irfft(torch.fft.rfft(x, dim=axis) * gain, n=length, dim=axis)
    return x.reshape(signal.shape)


@functools.lru_cache(maxsize=1024)
def _gain(length: int, sigma: float, power: float, device: torch.device) -> Tensor:
    """[length // 2 + 1]: the gain of the frequencies of a real signal along one axis."""
    noise = min(max(sigma, 1e-6), 1.0 - 1e-6)
    spectrum = 1.0 / (torch.fft.rfftfreq(length, dtype=torch.float64) ** power + 1e-16)
    gain = (1.0 - noise) * spectrum / ((1.0 - noise) ** 2 * spectrum + noise**2 + 1e-16)
    # all but the first, and the last of an even length, stand for two frequencies
    whole = torch.cat([gain, gain[1 : (length + 1) // 2]])
    scaled: Tensor = (gain / whole.mean()).float()
    return scaled.to(device)
