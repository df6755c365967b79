"""Pictures that come with a request, as tensors."""

from __future__ import annotations

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from omni_grpc.types.media import ImageInput, VideoInput
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Configs


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


def frames(video: VideoInput, *, width: int, height: int) -> Tensor:
    """The same for a video: [3, frames, height, width]."""
    size = video.width * video.height * 3
    pictures = [
        ImageInput(video.width, video.height, 3, video.data[start : start + size])
        for start in range(0, len(video.data), size)
    ]
    return torch.stack([pixels(picture, width=width, height=height) for picture in pictures], 1)


def preprocess(request: Request, configs: Configs) -> dict[str, Tensor]:
    """What is given, in the size of what is made, float32 in -1..1: "first_frame" and "last_frame" [3, height, width],
    "images" [n, 3, height, width], "source_video" [3, frames, height, width]. What is not given is left out.
    """
    inputs, width, height = request.inputs, request.width, request.height
    stills = {"first_frame": inputs.first_frame, "last_frame": inputs.last_frame}
    given = {name: pixels(image, width=width, height=height) for name, image in stills.items() if image is not None}
    if inputs.images:
        given["images"] = torch.stack([pixels(image, width=width, height=height) for image in inputs.images])
    if inputs.source_video is not None:
        given["source_video"] = frames(inputs.source_video, width=width, height=height)
    return given
