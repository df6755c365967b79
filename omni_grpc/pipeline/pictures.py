"""Pictures that come with a request, as tensors."""

from __future__ import annotations

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from omni_grpc.request import ImageInput


def picture(image: ImageInput) -> PIL.Image.Image:
    """The picture in RGB, transparent parts on white."""
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[image.channels]
    made = PIL.Image.frombytes(mode, (image.width, image.height), image.data)
    if mode == "RGBA":
        made = PIL.Image.alpha_composite(PIL.Image.new("RGBA", made.size, "white"), made)
    return made.convert("RGB")


def pixels(image: ImageInput, *, width: int, height: int) -> Tensor:
    """float32 [3, height, width] in -1..1: what a VAE encodes. Resampled by Lanczos, as in diffusers."""
    made = picture(image).resize((width, height), PIL.Image.Resampling.LANCZOS)
    unit = torch.from_numpy(np.asarray(made).astype(np.float32) / 255)
    return (2.0 * unit - 1.0).movedim(-1, 0)
