"""FLUX.1 Kontext: the size of a reference picture."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from omni_grpc.models.flux import kontext_limits
from omni_grpc.pipeline.pictures import image_tensor
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Configs

SIZES = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104),
    (1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688),
    (1568, 672),
)  # fmt: skip
"""Width and height of the reference pictures that the model was trained on."""


def preprocess(request: Request, configs: Configs, sizes: Sequence[tuple[int, int]] = SIZES) -> dict[str, Tensor]:
    """The reference picture as "images", float32 [1, 3, height, width] in -1..1, resized to one of `sizes`."""
    if not request.inputs.images:
        return {}
    (image,) = request.inputs.images
    width, height = nearest_size(image.width, image.height, kontext_limits(configs).size_multiple, sizes)
    return {"images": image_tensor(image, width=width, height=height)[None]}


def nearest_size(width: int, height: int, multiple: int, sizes: Sequence[tuple[int, int]] = SIZES) -> tuple[int, int]:
    """The size of which the aspect ratio is nearest to that of a picture, rounded down to multiples."""
    fit = min(sizes, key=lambda size: (abs(width / height - size[0] / size[1]), size))
    return fit[0] // multiple * multiple, fit[1] // multiple * multiple
