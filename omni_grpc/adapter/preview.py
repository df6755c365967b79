"""Previews of a running session, where its latents can be laid out as a picture."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from diffusers import DiffusionPipeline

from omni_grpc.pipeline.preview import latent_preview
from omni_grpc.types.media import PreviewImage
from omni_grpc.types.request import Request
from omni_grpc.worker import media

IMAGE = ("latents", "height", "width", "vae_scale_factor")
LAYERS = ("latents", "height", "width", "layers", "vae_scale_factor")
VIDEO = ("latents", "num_frames", "height", "width", "patch_size", "patch_size_t")
"""Parameters of `_unpack_latents`, by which pipelines with packed latents lay them out."""

MOST_OFF = math.log(1.25)
"""How far the shape of a picture may be from the one that was asked for: pipelines round sizes to whole tokens."""


class Previews:
    """Makes previews of one pipeline."""

    def __init__(self, pipeline: DiffusionPipeline) -> None:
        self._pipeline: Any = pipeline
        config = getattr(getattr(pipeline, "vae", None), "config", None)
        self._channels = getattr(config, "latent_channels", None) or getattr(config, "z_dim", None)
        self._unpack = getattr(pipeline, "_unpack_latents", None)
        self._kind = tuple(inspect.signature(self._unpack).parameters) if self._unpack is not None else ()

    @property
    def unavailable(self) -> str:
        """The message for a pipeline that cannot have previews."""
        return f"the latents of {type(self._pipeline).__name__} cannot be laid out as a picture"

    def make(self, request: Request, latents: torch.Tensor | None) -> tuple[PreviewImage, ...]:
        """One preview per output; none if latents [outputs, T, C] or [outputs, C, ..., h, w] form no picture."""
        asked = request.preview
        spatial = None if latents is None or asked is None else self._spatial(request, latents)
        if spatial is None or asked is None:
            return ()
        previews = []
        for index, latent in enumerate(spatial):
            picture = media.fit(latent_preview(latent, None), asked.max_edge_px)
            height, width, _ = picture.shape
            data = media.encode(picture, asked.format, preview=True)
            previews.append(PreviewImage(index, asked.format.mime_type, data, width, height))
        return tuple(previews)

    def _spatial(self, request: Request, latents: torch.Tensor) -> torch.Tensor | None:
        """Latents as [outputs, channels, height, width]; of a video, the frame in the middle."""
        if latents.ndim == 3:
            unpacked = self._unpacked(request, latents)
            if unpacked is None:
                return None
            latents = unpacked
        if latents.ndim == 5:
            if self._channels in latents.shape[1:3] and latents.shape[1] != self._channels:
                latents = latents.transpose(1, 2)
            # of layers, the first is all of them together
            latents = latents[:, :, 0 if self._kind == LAYERS else latents.shape[2] // 2]
        # some keep the frames of a video as a batch
        frames, odd = divmod(len(latents), request.num_outputs)
        if latents.ndim != 4 or latents.shape[1] < 3 or odd:
            return None
        return latents[frames // 2 :: frames]

    def _unpacked(self, request: Request, latents: torch.Tensor) -> torch.Tensor | None:
        """Tokens [outputs, tokens, channels] as a picture or a video, as the pipeline itself unpacks them."""
        pipeline, unpack, tokens = self._pipeline, self._unpack, latents.shape[1]
        made: torch.Tensor | None = None
        if hasattr(pipeline, "_unpack_latents_with_ids"):
            if (grid := _grid(tokens, request)) is not None:
                ids = pipeline._prepare_latent_ids(latents.new_empty(len(latents), 1, *grid)).to(latents.device)
                made = pipeline._unpatchify_latents(pipeline._unpack_latents_with_ids(latents, ids))
        elif unpack is not None and self._kind == VIDEO:
            patch, patch_t = pipeline.transformer_spatial_patch_size, pipeline.transformer_temporal_patch_size
            side = pipeline.vae_spatial_compression_ratio * patch
            rows, columns = request.height // side, request.width // side
            frames, odd = divmod(tokens, rows * columns)
            if frames and not odd:
                made = unpack(latents, frames * patch_t, rows * patch, columns * patch, patch, patch_t)
        elif unpack is not None and self._kind in (IMAGE, LAYERS):
            layers = request.layers or 0
            pictures = layers + 1
            if tokens % pictures == 0 and (grid := _grid(tokens // pictures, request)) is not None:
                scale = pipeline.vae_scale_factor
                # a token is a pixel of the latents, or two by two of them
                side = scale * (1 if latents.shape[2] == self._channels else 2)
                height, width = (length * side for length in grid)
                more = (layers,) if self._kind == LAYERS else ()
                made = unpack(latents, height, width, *more, scale)
        return made


def _grid(tokens: int, request: Request) -> tuple[int, int] | None:
    """Rows and columns of so many tokens, in the shape nearest to the one that was asked for."""
    asked = math.log(request.height / request.width)
    pairs = [(rows, tokens // rows) for rows in range(1, tokens + 1) if tokens % rows == 0]
    rows, columns = min(pairs, key=lambda pair: abs(math.log(pair[0] / pair[1]) - asked))
    return (rows, columns) if abs(math.log(rows / columns) - asked) <= MOST_OFF else None
