"""Images and videos that come with a request, as tensors."""

from __future__ import annotations

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from omni_grpc.types.media import ImageInput, VideoInput
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Configs


def to_pil(image: ImageInput) -> PIL.Image.Image:
    """The image in RGB, its transparent parts on white."""
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[image.channels]
    made = PIL.Image.frombytes(mode, (image.width, image.height), image.data)
    if mode == "RGBA":
        made = PIL.Image.alpha_composite(PIL.Image.new("RGBA", made.size, "white"), made)
    return made.convert("RGB")


def image_tensor(image: ImageInput, *, width: int, height: int) -> Tensor:
    """The image as the VAE encodes it: float32 [3, height, width] in -1..1, resized with Lanczos as in diffusers."""
    made = to_pil(image).resize((width, height), PIL.Image.Resampling.LANCZOS)
    unit = torch.from_numpy(np.asarray(made).astype(np.float32) / 255)
    return (2.0 * unit - 1.0).movedim(-1, 0)


def video_tensor(video: VideoInput, *, width: int, height: int) -> Tensor:
    """The frames of a video, each as in `image_tensor`: [3, frames, height, width]."""
    size = video.width * video.height * 3
    frames = [
        ImageInput(video.width, video.height, 3, video.data[start : start + size])
        for start in range(0, len(video.data), size)
    ]
    return torch.stack([image_tensor(frame, width=width, height=height) for frame in frames], 1)


def preprocess(request: Request, configs: Configs) -> dict[str, Tensor]:
    """The media of a request in the size of its output, float32 in -1..1: "first_frame" and "last_frame" [3, height,
    width], "images" [n, 3, height, width], "source_video" [3, frames, height, width]. What is not given is left out.
    """
    inputs, size = request.inputs, {"width": request.width, "height": request.height}
    stills = {"first_frame": inputs.first_frame, "last_frame": inputs.last_frame}
    given = {name: image_tensor(image, **size) for name, image in stills.items() if image is not None}
    if inputs.images:
        given["images"] = torch.stack([image_tensor(image, **size) for image in inputs.images])
    if inputs.source_video is not None:
        given["source_video"] = video_tensor(inputs.source_video, **size)
    return given
