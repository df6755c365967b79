"""Pictures of what a session is working on, where its latents can be laid out as a picture."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from diffusers import DiffusionPipeline

from omni_grpc.pipeline.preview import latent_picture
from omni_grpc.request import PreviewImage, Request
from omni_grpc.worker import media

UNPACK = ("latents", "height", "width", "vae_scale_factor")
"""Parameters of the `_unpack_latents` that most pipelines with packed latents have."""


class Previews:
    """Makes previews of one pipeline. `unavailable` says why there are none, once one could not be made."""

    def __init__(self, pipeline: DiffusionPipeline) -> None:
        self._pipeline = pipeline
        self.unavailable = ""

    def make(self, request: Request, latents: torch.Tensor | None) -> tuple[PreviewImage, ...]:
        """One preview for each output."""
        asked = request.preview
        spatial = None if latents is None or asked is None else self._spatial(request, latents)
        if spatial is None or asked is None:
            self.unavailable = f"the latents of {type(self._pipeline).__name__} cannot be laid out as a picture"
            return ()
        previews = []
        for index, latent in enumerate(spatial[: request.num_outputs]):
            picture = media.fit(latent_picture(latent, None), asked.max_edge)
            height, width, _ = picture.shape
            data = media.encode(picture, asked.format, preview=True)
            previews.append(PreviewImage(index, asked.format.mime_type, data, width, height))
        return tuple(previews)

    def _spatial(self, request: Request, latents: torch.Tensor) -> torch.Tensor | None:
        """Latents as [outputs, channels, height, width]; of a video, the frame in the middle."""
        if latents.ndim == 3:
            unpack: Any = getattr(self._pipeline, "_unpack_latents", None)
            if unpack is None or tuple(inspect.signature(unpack).parameters) != UNPACK:
                return None
            latents = unpack(latents, request.height, request.width, self._pipeline.vae_scale_factor)
        if latents.ndim == 5:
            latents = latents[:, :, latents.shape[2] // 2]
        return latents if latents.ndim == 4 and latents.shape[1] >= 3 else None
