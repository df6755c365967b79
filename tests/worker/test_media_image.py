import io

import numpy as np
import PIL.Image
import pytest

from omni_grpc.types.media import ImageFormat
from omni_grpc.worker import media

RGBA = np.zeros((2, 3, 4), np.uint8)
RGBA[0, :] = (200, 100, 0, 255)
RGBA[1, :] = (200, 100, 0, 51)  # one fifth


def opened(data):
    return PIL.Image.open(io.BytesIO(data))


@pytest.mark.parametrize("format", [ImageFormat.PNG, ImageFormat.WEBP])
def test_alpha_is_kept_where_the_format_has_it(format):
    assert media.keeps_alpha(format)
    image = opened(media.encode(RGBA, format))
    assert image.mode == "RGBA"
    assert np.array_equal(np.asarray(image)[..., 3], RGBA[..., 3])


def test_png_gives_every_pixel_back():
    assert np.array_equal(np.asarray(opened(media.encode(RGBA, ImageFormat.PNG))), RGBA)


def test_alpha_is_laid_on_white_where_the_format_has_none():
    expected = np.empty((2, 3, 3), np.uint8)
    expected[0], expected[1] = (200, 100, 0), (244, 224, 204)  # 51/255 of the colour over white
    assert not media.keeps_alpha(ImageFormat.RAW_RGB8)
    assert media.encode(RGBA, ImageFormat.RAW_RGB8) == expected.tobytes()
    jpeg = np.asarray(opened(media.encode(RGBA.repeat(16, 0).repeat(16, 1), ImageFormat.JPEG))).astype(int)
    assert not media.keeps_alpha(ImageFormat.JPEG)
    assert abs(jpeg[4, 4] - expected[0, 0]).max() <= 3
    assert abs(jpeg[-4, -4] - expected[1, 0]).max() <= 3


def test_raw_pixels_of_an_opaque_image_are_its_own_bytes():
    rgb = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    assert media.encode(rgb, ImageFormat.RAW_RGB8) == rgb.tobytes()
