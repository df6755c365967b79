"""Pictures of a request as tensors, against what diffusers makes of the same picture."""

from __future__ import annotations

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor

from omni_grpc.pipeline.pictures import image_tensor, to_pil
from omni_grpc.types.media import ImageInput

NOISE = np.random.default_rng(0).integers(0, 256, (30, 47, 4), np.uint8)


@pytest.mark.parametrize("size", [(47, 30), (96, 64), (16, 48)])
def test_a_picture_is_resized_and_scaled_as_in_diffusers(size: tuple[int, int]) -> None:
    rgb = np.ascontiguousarray(NOISE[..., :3])
    width, height = size
    mine = image_tensor(ImageInput(47, 30, 3, rgb.tobytes()), width=width, height=height)
    processor = VaeImageProcessor(vae_scale_factor=1)
    theirs = processor.preprocess(processor.resize(PIL.Image.fromarray(rgb), height, width), height, width)
    assert mine.dtype == torch.float32
    assert torch.equal(mine, theirs[0])


def test_a_mask_is_grey_and_what_is_transparent_is_white() -> None:
    grey = to_pil(ImageInput(2, 1, 1, bytes([0, 200])))
    assert np.asarray(grey).tolist() == [[[0, 0, 0], [200, 200, 200]]]
    faded = to_pil(ImageInput(3, 1, 4, bytes([10, 20, 30, 255, 10, 20, 30, 0, 0, 0, 0, 51])))
    assert np.asarray(faded).tolist() == [[[10, 20, 30], [255, 255, 255], [204, 204, 204]]]
