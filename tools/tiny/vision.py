"""What shows pictures to a language model, for tests."""

from __future__ import annotations

from typing import Any

# diffusers looks for ProcessorMixin in the module of a component to learn how it is loaded
from transformers import ProcessorMixin, Qwen2Tokenizer, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class PictureProcessor(Qwen2VLProcessor):
    """Qwen's processor without the part for videos, which needs torchvision: there is none for a CPU build of torch on
    every index.
    """

    def __init__(
        self,
        image_processor: Qwen2VLImageProcessorPil | None = None,
        tokenizer: Qwen2Tokenizer | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template, **kwargs)


def picture_processor(tokenizer: Qwen2Tokenizer) -> ProcessorMixin:
    """Pictures become 4 to 16 tokens."""
    pixels = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    return PictureProcessor(Qwen2VLImageProcessorPil(size=pixels), tokenizer)
