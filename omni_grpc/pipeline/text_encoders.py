"""Text encoders: from a prompt to the hidden states that a denoiser is conditioned on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PromptEmbeds:
    """One encoded prompt.

    hidden: [T, C], the hidden states of its tokens, with padding where the model attends to padding.
    pooled: [1, C], where the model is also modulated by one vector of the whole prompt.
    tokens: how many tokens of the prompt condition the output. dropped: how many more did not fit.
    """

    hidden: Tensor
    pooled: Tensor | None = None
    tokens: int
    dropped: int


PROMPT = "prompt"
"""The stream of what text encoders compute. They read one prompt at a time; while they do, a row of its owner is
active.
"""


class TextEncoder(nn.Module):
    """From a prompt to its embeds: what a pipeline calls, whatever language model is inside, as `encoder`."""

    encoder: Any

    def forward(self, prompt: str) -> PromptEmbeds:
        raise NotImplementedError


class CausalTextEncoder(TextEncoder):
    """A language model as a text encoder (Qwen-Image, Z-Image, FLUX.2, Ovis).

    template: puts a prompt into the text that the model reads. max_tokens: tokens of that text that are kept, without
    the first `prefix` ones, which belong to the template and whose hidden states are dropped. layers: indices into the
    model's `hidden_states`, concatenated along the channels; none: its last hidden state, after the final norm.
    """

    def __init__(
        self,
        encoder: Any,
        tokenizer: Any,
        *,
        template: Callable[[str], str],
        max_tokens: int,
        prefix: int = 0,
        layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.encoder, self.tokenizer, self.template = encoder, tokenizer, template
        self.max_tokens, self.prefix, self.layers = max_tokens, prefix, tuple(layers)

    def forward(self, prompt: str) -> PromptEmbeds:
        """The model is causal, so cutting its input is the same as cutting its output."""
        every = self.tokenizer(self.template(prompt)).input_ids
        kept = every[: self.prefix + self.max_tokens]
        ids = torch.tensor([kept], device=self.encoder.device)
        if self.layers:
            states = self.encoder(ids, output_hidden_states=True, use_cache=False).hidden_states
            hidden = torch.cat([states[layer] for layer in self.layers], -1)
        else:
            hidden = self.encoder(ids, use_cache=False).last_hidden_state
        hidden = hidden[0, self.prefix :]
        return PromptEmbeds(hidden=hidden, tokens=len(hidden), dropped=len(every) - len(kept))


class PaddedTextEncoder(TextEncoder):
    """An encoder (T5, CLIP) whose prompts are padded to `length` tokens, all of which the model attends to."""

    def __init__(self, encoder: Any, tokenizer: Any, length: int) -> None:
        super().__init__()
        self.encoder, self.tokenizer, self.length = encoder, tokenizer, length

    def forward(self, prompt: str) -> PromptEmbeds:
        """The last hidden state and, where the encoder has one, the pooled vector."""
        ids = self.tokenizer(
            prompt, padding="max_length", max_length=self.length, truncation=True, return_tensors="pt"
        ).input_ids
        every = len(self.tokenizer(prompt, verbose=False).input_ids)
        encoded = self.encoder(ids.to(self.encoder.device))
        return PromptEmbeds(
            hidden=encoded.last_hidden_state[0],
            pooled=encoded.get("pooler_output"),
            tokens=min(every, self.length),
            dropped=max(every - self.length, 0),
        )
