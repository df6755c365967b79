"""FLUX.1 Kontext: edits of a picture, whose tokens follow those that are denoised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from omni_grpc.models.flux.kontext_preprocess import SIZES
from omni_grpc.models.flux.pipeline_text_to_image import FluxPipeline
from omni_grpc.types.request import Request


class FluxKontextPipeline(FluxPipeline):
    """Without a picture it does text to image.

    sizes: a picture is resized to the one whose aspect ratio is nearest to its own, whatever the size of the output.
    """

    sizes: Sequence[tuple[int, int]] = SIZES

    def preprocess(self, request: Request) -> Mapping[str, Tensor]:
        made: Mapping[str, Tensor] = self.spec.preprocess(request, self.configs, sizes=self.sizes)
        return made
