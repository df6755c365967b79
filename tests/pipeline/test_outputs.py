"""Pixels to bytes, against diffusers' image processor; and parts to a whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor

from omni_grpc.pipeline.outputs import Output, join, to_uint8
from omni_grpc.types.errors import InternalError


def test_bytes_are_those_of_diffusers() -> None:
    pixels = torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(0)) * 1.2
    expected = VaeImageProcessor().postprocess(pixels, output_type="pil")
    for mine, theirs in zip(to_uint8(pixels), expected, strict=True):
        assert mine.flags.c_contiguous
        np.testing.assert_array_equal(mine, np.asarray(theirs))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_no_image(value: float) -> None:
    pixels = torch.zeros(1, 3, 2, 2)
    pixels[0, 1, 1, 0] = value
    with pytest.raises(InternalError, match="not finite"):
        to_uint8(pixels)


def test_parts_follow_each_other_in_time() -> None:
    first, second = (np.full((n, 2, 3, 3), n, np.uint8) for n in (2, 1))
    sounds = [np.full((1, n), n, np.float32) for n in (4, 3)]
    whole = join([Output(pixels=first, samples=sounds[0]), Output(pixels=second, samples=sounds[1])])
    assert whole.pixels is not None
    assert whole.pixels[:, 0, 0, 0].tolist() == [2, 2, 1]
    assert whole.samples is not None
    assert whole.samples.tolist() == [[4, 4, 4, 4, 3, 3, 3]]
    only = Output(samples=sounds[0])
    assert join([only]) is only
    assert join([only, only]).pixels is None
