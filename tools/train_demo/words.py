"""The tokenizer of the bundled model: every word of its captions is one token, everything else is spelled in bytes."""

from __future__ import annotations

from transformers import Qwen2Tokenizer

from omni_grpc.scenes.captions import known_words
from tools.tiny.text import QWEN_IMAGE_PREFIX, qwen_tokenizer

PREFIX_TOKENS = 34
"""What Qwen-Image drops from the front of every prompt."""
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"


def tokenizer() -> Qwen2Tokenizer:
    """The same in every process."""
    words = known_words()
    sentences = [QWEN_IMAGE_PREFIX, "assistant\n", *words, *(word.capitalize() for word in words)]
    made = qwen_tokenizer((*sentences, " ".join(["", *words])))
    made.init_kwargs["known_words"] = list(words)
    return made


def template(caption: str) -> str:
    """A caption as the pipeline wraps it."""
    system, _, instruction = QWEN_IMAGE_PREFIX.partition("\n")
    question = instruction.removesuffix("\nuser\n")
    return f"<|im_start|>{system}\n{question}<|im_end|>\n<|im_start|>user\n{caption}{SUFFIX}"
