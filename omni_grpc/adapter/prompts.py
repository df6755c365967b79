"""Prompt lengths in tokens, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import DiffusionPipeline
from transformers import PreTrainedTokenizerBase

from omni_grpc.adapter.parameters import Signature
from omni_grpc.types.request import Request

UNLIMITED = 1_000_000
"""Tokenizers without a limit say a number far above this."""


def count_tokens(
    pipeline: DiffusionPipeline, request: Request, call_kwargs: Mapping[str, Any]
) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Tokens of the prompt, and (field, tokens that did not fit) for each text that is too long.

    With several text encoders it counts for the one that takes the most: what that one sees is not lost. What a
    pipeline adds around the prompt is not counted.
    """
    length = max((_fit(pipeline, tokenizer, request, call_kwargs) for tokenizer in _tokenizers(pipeline)), default=None)
    if length is None:
        return 0, ()
    most, index = length
    tokenizer = _tokenizers(pipeline)[index]
    counts = {
        field: len(tokenizer(text, verbose=False)["input_ids"])
        for field, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt))
        if text
    }
    dropped = tuple((field, count - most) for field, count in counts.items() if count > most)
    return counts.get("prompt", 0), dropped


def _tokenizers(pipeline: DiffusionPipeline) -> list[PreTrainedTokenizerBase]:
    names = sorted(name for name in pipeline.components if name.startswith("tokenizer"))
    parts = (getattr(pipeline, name, None) for name in names)
    return [part for part in parts if isinstance(part, PreTrainedTokenizerBase)]


def _fit(
    pipeline: DiffusionPipeline, tokenizer: PreTrainedTokenizerBase, request: Request, call_kwargs: Mapping[str, Any]
) -> tuple[int, int]:
    """How many tokens the encoder of a tokenizer takes, and the place of that tokenizer."""
    place = _tokenizers(pipeline).index(tokenizer)
    own = tokenizer.model_max_length
    parameter = Signature(type(pipeline)).parameters.get("max_sequence_length")
    asked = {**call_kwargs, **request.extra}.get("max_sequence_length", parameter.default if parameter else None)
    # encoders of 77 tokens have no other length
    if own == 77 or not isinstance(asked, int):
        return (own if own < UNLIMITED else UNLIMITED), place
    return asked, place
