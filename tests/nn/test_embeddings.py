"""The timestep's sinusoid, against the function that Qwen-Image uses in diffusers."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import get_timestep_embedding

from omni_grpc.nn.embeddings import sinusoid


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinusoid_rounds_where_diffusers_does(dtype: torch.dtype) -> None:
    t = torch.linspace(1, 0, 7).to(dtype)
    expected = get_timestep_embedding(t, 256, flip_sin_to_cos=True, downscale_freq_shift=0, scale=1000)
    assert torch.equal(sinusoid(t), expected)
