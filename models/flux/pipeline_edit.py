"""FLUX.1 Kontext, edits of a picture: it goes along as tokens beside those that are denoised."""

from __future__ import annotations

from collections.abc import Sequence

from omni_grpc.models.flux.pipeline_text_to_image import FluxPipeline, Reference
from omni_grpc.pipeline.pictures import pixels
from omni_grpc.request import Request

SIZES = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104),
    (1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688),
    (1568, 672),
)  # fmt: skip
"""Width and height of the pictures that the model was trained to go by."""


class FluxKontextPipeline(FluxPipeline):
    """Without a picture it makes one of the prompt alone.

    sizes: a picture to go by is brought to the one whose shape is nearest to its own, whatever is made of it.
    """

    sizes: Sequence[tuple[int, int]] = SIZES

    def reference(self, request: Request) -> Reference | None:
        if not request.inputs.images:
            return None
        (image,) = request.inputs.images
        width, height = self.size(image.width, image.height)
        given = pixels(image, width=width, height=height).to(device=self.device, dtype=self.dtype)
        config = self.vae.config
        latents = (self.vae.encode(given[None]).latent_dist.mode() - config.shift_factor) * config.scaling_factor
        grid = self.grid(width, height)
        return Reference(tokens=grid.pack(latents[0][:, None]), grid=grid)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """What a picture of that size in pixels is brought to."""
        shape, multiple = width / height, self.size_multiple
        nearest = min(self.sizes, key=lambda size: (abs(shape - size[0] / size[1]), size))
        return nearest[0] // multiple * multiple, nearest[1] // multiple * multiple
