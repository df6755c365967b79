"""Prompts as Wan reads them."""

from __future__ import annotations

import dataclasses
import html
import re
from typing import Any

import ftfy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.models.wan import TEXT_TOKENS


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """Hidden states [TEXT_TOKENS, C] of `tokens` tokens, zeros after them; `dropped` more tokens did not fit."""

    hidden: Tensor
    tokens: int
    dropped: int


class WanText(nn.Module):
    """UMT5. The zeros that follow the hidden states of a prompt are tokens like others to the transformer, which has
    learned to attend to them.
    """

    def __init__(self, encoder: Any, tokenizer: Any) -> None:
        super().__init__()
        self.encoder, self.tokenizer = encoder, tokenizer

    def encode(self, text: str) -> Text:
        cleaned = re.sub(r"\s+", " ", html.unescape(html.unescape(ftfy.fix_text(text)))).strip()
        kept = self.tokenizer(cleaned, truncation=True, max_length=TEXT_TOKENS).input_ids
        every = self.tokenizer(cleaned, verbose=False).input_ids
        hidden = self.encoder(torch.tensor([kept], device=self.encoder.device)).last_hidden_state[0]
        padded = F.pad(hidden, (0, 0, 0, TEXT_TOKENS - len(kept)))
        return Text(hidden=padded, tokens=len(kept), dropped=len(every) - len(kept))
