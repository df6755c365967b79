"""A tiny HunyuanImage-2.1: pictures by a component that guides, and by another one where the prompt quotes a text."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AdaptiveProjectedMixGuidance,
    AutoencoderKLHunyuanImage,
    FlowMatchEulerDiscreteScheduler,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
)
from transformers import ByT5Tokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tools.tiny.images import disturb_norms
from tools.tiny.text import qwen_tokenizer, t5_encoder


def build_hunyuan_image(folder: Path, *, seed: int = 0) -> Path:
    """Guided with a scale of 3.5, and with 5 where the prompt quotes a text."""
    tokenizer, letters = qwen_tokenizer(), ByT5Tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = HunyuanImageTransformer2DModel(
            in_channels=16,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            text_embed_dim=32,
            text_embed_2_dim=32,
            rope_axes_dim=(8, 8),
        )
        disturb_norms(transformer)
        pipeline = HunyuanImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
            vae=AutoencoderKLHunyuanImage(
                in_channels=3,
                out_channels=3,
                latent_channels=16,
                block_out_channels=(32, 32, 32, 32),
                layers_per_block=1,
                spatial_compression_ratio=8,
                sample_size=64,
                scaling_factor=0.75,
            ),
            text_encoder=_encoder(len(tokenizer)),
            tokenizer=tokenizer,
            text_encoder_2=t5_encoder(letters, width=32),
            tokenizer_2=letters,
            transformer=transformer,
            guider=AdaptiveProjectedMixGuidance(guidance_scale=3.5, adaptive_projected_guidance_start_step=1),
            ocr_guider=AdaptiveProjectedMixGuidance(guidance_scale=5.0, adaptive_projected_guidance_start_step=3),
        )
    pipeline.save_pretrained(folder)
    return folder


def _encoder(words: int) -> Qwen2_5_VLForConditionalGeneration:
    """It can see, too, but nobody shows it anything."""
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": words,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 32,
            },
        )
    )
