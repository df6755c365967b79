"""Prompts as UMT5 encodes them. It is a shared part: several families have this text encoder."""

from __future__ import annotations

import html
import re
from typing import Any

import ftfy
import torch
import torch.nn.functional as F

from omni_grpc.pipeline.text_encoders import PromptEmbeds, TextEncoder


class Umt5TextEncoder(TextEncoder):
    """UMT5, with every prompt brought to `length` tokens. The zeros that follow the hidden states of a prompt are
    tokens like others to the transformer, which has learned to attend to them.
    """

    def __init__(self, encoder: Any, tokenizer: Any, length: int) -> None:
        super().__init__()
        self.encoder, self.tokenizer, self.length = encoder, tokenizer, length

    def forward(self, prompt: str) -> PromptEmbeds:
        """Hidden states [length, C], cleaned and cut as in diffusers."""
        cleaned = re.sub(r"\s+", " ", html.unescape(html.unescape(ftfy.fix_text(prompt)))).strip()
        kept = self.tokenizer(cleaned, truncation=True, max_length=self.length).input_ids
        every = self.tokenizer(cleaned, verbose=False).input_ids
        hidden = self.encoder(torch.tensor([kept], device=self.encoder.device)).last_hidden_state[0]
        padded = F.pad(hidden, (0, 0, 0, self.length - len(kept)))
        return PromptEmbeds(hidden=padded, tokens=len(kept), dropped=len(every) - len(kept))
