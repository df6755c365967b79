"""Percentiles, confidence intervals, and the similarity of two pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Interval = tuple[float, float]

Z = 1.959964
"""Half the width of a 95 % interval, in standard deviations."""
WINDOW, SIGMA = 11, 1.5
"""Pixels and standard deviation of the window of SSIM."""


def quantile(values: Sequence[float], q: float) -> float:
    """The value that a share of q does not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def share(right: int, total: int) -> Interval:
    """Wilson's 95 % interval of a share (Wilson 1927)."""
    if not total:
        return 0.0, 1.0
    p, spread = right / total, Z * Z / total
    middle = (p + spread / 2) / (1 + spread)
    half = Z * math.sqrt(p * (1 - p) / total + spread / (4 * total)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def difference(before: Sequence[bool], after: Sequence[bool]) -> tuple[float, Interval]:
    """How much larger the share of True is in `after`, case by case, and its 95 % interval: Wald's for matched pairs
    with half a pair added to each of the four cells, which holds where few or none differ (Agresti & Min 2005).
    """
    lost = sum(a and not b for a, b in zip(before, after, strict=True))
    won = sum(b and not a for a, b in zip(before, after, strict=True))
    total = len(before) + 2
    middle = (won - lost) / total
    half = Z * math.sqrt(won + lost + 1 - (won - lost) ** 2 / total) / total
    return (won - lost) / max(1, len(before)), (middle - half, middle + half)


def psnr(picture: Pixels, other: Pixels) -> float:
    """Peak signal to noise ratio in dB; infinite for the same picture."""
    error = float(np.square(picture.astype(np.float64) - other).mean())
    return 10 * math.log10(255**2 / error) if error else math.inf


def ssim(picture: Pixels, other: Pixels) -> float:
    """Structural similarity of the luma, from -1 to 1 (Wang et al. 2004, equation 13, a Gaussian window)."""
    x, y = (image.astype(np.float64) @ (0.299, 0.587, 0.114) for image in (picture, other))
    mean_x, mean_y = _blur(x), _blur(y)
    var_x, var_y = _blur(x * x) - mean_x**2, _blur(y * y) - mean_y**2
    cov = _blur(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    up = (2 * mean_x * mean_y + c1) * (2 * cov + c2)
    return float((up / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean())


def _blur(image: NDArray[np.float64]) -> NDArray[np.float64]:
    """A Gaussian over the pixels that have a whole window around them."""
    weights = np.exp(-((np.arange(WINDOW) - WINDOW // 2) ** 2) / (2 * SIGMA**2))
    weights /= weights.sum()
    for axis in (0, 1):
        windows = np.lib.stride_tricks.sliding_window_view(image, WINDOW, axis)
        image = windows @ weights
    return image
