"""Tiny HunyuanVideo-1.5: videos of a text or of its first frame, guided by a component that has the scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tools.tiny.images import disturb_norms
from tools.tiny.text import QWEN_CHAT, qwen_tokenizer, t5_encoder


def build_hunyuan_video15(folder: Path, *, seed: int = 0) -> Path:
    """A HunyuanVideo-1.5 T2V, guided with a scale of 6 unless it is told another one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = HunyuanVideo15Pipeline(**_parts("t2v"))
    pipeline.save_pretrained(folder)
    return folder


def build_hunyuan_video15_i2v(folder: Path, *, seed: int = 0) -> Path:
    """A HunyuanVideo-1.5 I2V: the first frame is encoded by a VAE and seen by SigLIP."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        eye = SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=54,
                patch_size=2,
            )
        )
        pipeline = HunyuanVideo15ImageToVideoPipeline(
            **_parts("i2v"),
            image_encoder=eye,
            feature_extractor=SiglipImageProcessorPil(size={"height": 54, "width": 54}),
        )
    pipeline.save_pretrained(folder)
    return folder


def _parts(task: str) -> dict[str, Any]:
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = QWEN_CHAT
    letters = ByT5Tokenizer()
    encoder = Qwen2_5_VLTextModel(
        Qwen2_5_VLTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6},
        )
    )
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=65,
        out_channels=32,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_refiner_layers=1,
        text_embed_dim=32,
        text_embed_2_dim=32,
        image_embed_dim=32,
        rope_axes_dim=(4, 6, 6),
        target_size=64,
        task_type=task,
    )
    disturb_norms(transformer)
    return {
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "transformer": transformer,
        "vae": AutoencoderKLHunyuanVideo15(block_out_channels=(32, 32, 32, 32, 64), layers_per_block=1),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "text_encoder_2": t5_encoder(letters, width=32),
        "tokenizer_2": letters,
        "guider": ClassifierFreeGuidance(guidance_scale=6.0),
    }
