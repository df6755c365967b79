"""Prompts as video models read them that have UMT5 for a text encoder."""

from __future__ import annotations

import dataclasses
import html
import re
from typing import Any

import ftfy
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """Hidden states [length, C] of `tokens` tokens, zeros after them; `dropped` more tokens did not fit."""

    hidden: Tensor
    tokens: int
    dropped: int


class Umt5Text(nn.Module):
    """UMT5, with every text brought to `length` tokens. The zeros that follow the hidden states of a prompt are tokens
    like others to the transformer, which has learned to attend to them.
    """

    def __init__(self, encoder: Any, tokenizer: Any, length: int) -> None:
        super().__init__()
        self.encoder, self.tokenizer, self.length = encoder, tokenizer, length

    def encode(self, text: str) -> Text:
        cleaned = re.sub(r"\s+", " ", html.unescape(html.unescape(ftfy.fix_text(text)))).strip()
        kept = self.tokenizer(cleaned, truncation=True, max_length=self.length).input_ids
        every = self.tokenizer(cleaned, verbose=False).input_ids
        hidden = self.encoder(torch.tensor([kept], device=self.encoder.device)).last_hidden_state[0]
        padded = F.pad(hidden, (0, 0, 0, self.length - len(kept)))
        return Text(hidden=padded, tokens=len(kept), dropped=len(every) - len(kept))
