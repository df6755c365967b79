"""Which tokens of a prompt are kept, and which hidden states are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils import ModelOutput

from omni_grpc.pipeline.text_encoders import CausalTextEncoder, PaddedTextEncoder

LAYERS, CHANNELS = 4, 3


class Words:
    """A token per word: its length. With `max_length`, cut and padded with zeros."""

    def __call__(
        self, text: str, *, padding: str = "", max_length: int = 0, truncation: bool = False, **more: Any
    ) -> Any:
        ids = [len(word) for word in text.split()]
        if truncation:
            ids = ids[:max_length]
        if padding == "max_length":
            ids += [0] * (max_length - len(ids))
        return SimpleNamespace(input_ids=torch.tensor([ids]) if "return_tensors" in more else ids)


class Encoder(torch.nn.Module):
    """Hidden states of layer n: 10 n + the token, in each channel."""

    device = "cpu"

    def __init__(self, *, pools: bool = False) -> None:
        super().__init__()
        self.pools = pools

    def forward(self, ids: Tensor, *, output_hidden_states: bool = False, use_cache: bool = False) -> ModelOutput:
        states = [10.0 * layer + ids[..., None].expand(-1, -1, CHANNELS) for layer in range(LAYERS + 1)]
        more = {"hidden_states": tuple(states)} if output_hidden_states else {}
        return ModelOutput(
            last_hidden_state=states[-1] + 0.5, **more, **({"pooler_output": states[-1][:, 0]} if self.pools else {})
        )


@pytest.mark.parametrize(
    ("prompt", "kept", "dropped"), [("a bb", [1, 2, 6], 0), ("a bb ccc dddd eeeee", [1, 2, 3, 4], 2), ("", [6], 0)]
)
def test_the_prefix_of_a_template_is_dropped_and_long_prompts_are_cut(
    prompt: str, kept: list[int], dropped: int
) -> None:
    encode = CausalTextEncoder(
        Encoder(), Words(), template=lambda prompt: f"sevenxx eightxxx {prompt} suffix", prefix=2, max_tokens=4
    )
    embeds = encode(prompt)
    assert embeds.hidden.equal(10 * LAYERS + 0.5 + torch.tensor(kept)[:, None].expand(-1, CHANNELS))
    assert (embeds.tokens, embeds.dropped, embeds.pooled) == (len(kept), dropped, None)


def test_hidden_layers_are_concatenated_in_the_order_that_is_given() -> None:
    encode = CausalTextEncoder(Encoder(), Words(), template=str, max_tokens=9, layers=(3, 1, -1))
    expected = torch.tensor([[30.0], [10.0], [40.0]]).expand(-1, CHANNELS).reshape(1, -1) + torch.tensor([[1], [2]])
    assert encode("a bb").hidden.equal(expected)


@pytest.mark.parametrize(("prompt", "kept", "dropped"), [("a bb", [1, 2, 0], 0), ("a bb ccc dddd", [1, 2, 3], 1)])
def test_prompts_are_padded_to_one_length(prompt: str, kept: list[int], dropped: int) -> None:
    embeds = PaddedTextEncoder(Encoder(pools=True), Words(), 3)(prompt)
    assert embeds.hidden.equal(10 * LAYERS + 0.5 + torch.tensor(kept)[:, None].expand(-1, CHANNELS))
    assert (embeds.tokens, embeds.dropped) == (len(prompt.split()) - dropped, dropped)
    assert embeds.pooled is not None
    assert embeds.pooled.equal(torch.full((1, CHANNELS), 41.0))
    assert PaddedTextEncoder(Encoder(), Words(), 3)(prompt).pooled is None
