"""FLUX.1 Kontext, edits of a picture: it goes along as tokens beside those that are denoised."""

from __future__ import annotations

from collections.abc import Sequence

from omni_grpc.models.flux.kontext_pictures import SIZES
from omni_grpc.models.flux.pipeline_text_to_image import FluxPipeline, Reference
from omni_grpc.types.request import Request


class FluxKontextPipeline(FluxPipeline):
    """Without a picture it makes one of the prompt alone.

    sizes: a picture to go by is brought to the one whose shape is nearest to its own, whatever is made of it.
    """

    sizes: Sequence[tuple[int, int]] = SIZES

    def reference(self, request: Request) -> Reference | None:
        given = self.checkpoint.spec.preprocess(request, self.checkpoint.configs, sizes=self.sizes).get("images")
        if given is None:
            return None
        given, config = given.to(device=self.device, dtype=self.dtype), self.vae.config
        latents = (self.vae.encode(given).latent_dist.mode() - config.shift_factor) * config.scaling_factor
        grid = self.grid(given.shape[-1], given.shape[-2])
        return Reference(tokens=grid.pack(latents[0][:, None]), grid=grid)
