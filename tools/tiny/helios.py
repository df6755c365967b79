"""A tiny Helios: a Wan whose long videos are made chunk by chunk."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, HeliosPipeline, HeliosScheduler
from diffusers import HeliosTransformer3DModel as HeliosTransformer

from tools.tiny.images import disturb_norms
from tools.tiny.text import t5_encoder, t5_tokenizer


def build_helios(folder: Path, *, seed: int = 0, heads: int = 4, head_dim: int = 16, layers: int = 2) -> Path:
    """A Helios that weighs the keys of its history, each head in its own way."""
    tokenizer = t5_tokenizer(512)
    time_axis = head_dim // 8 * 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = HeliosPipeline(
            tokenizer=tokenizer,
            text_encoder=t5_encoder(tokenizer, multilingual=True),
            vae=AutoencoderKLWan(
                base_dim=2, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
            ),
            scheduler=HeliosScheduler(stages=1, use_dynamic_shifting=True),
            transformer=HeliosTransformer(
                num_attention_heads=heads,
                attention_head_dim=head_dim,
                text_dim=64,
                freq_dim=64,
                ffn_dim=128,
                num_layers=layers,
                rope_dim=(time_axis, (head_dim - time_axis) // 2, (head_dim - time_axis) // 2),
                is_amplify_history=True,
            ),
        )
        disturb_norms(pipeline.transformer)
        for block in pipeline.transformer.blocks:
            # they start as ones, all alike
            block.attn1.history_key_scale.data = torch.randn(heads)
            # most tokens of a text are padding: what its words say must not get lost among them
            block.attn2.to_out[0].weight.data *= 3
    pipeline.save_pretrained(folder)
    return folder
