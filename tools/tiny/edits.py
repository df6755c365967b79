"""Tiny pipelines that look at pictures: Qwen-Image-Edit, Edit-Plus and Layered, FLUX.2 Klein."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLFlux2,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageLayeredPipeline,
)
from diffusers import Flux2Transformer2DModel as Flux2Transformer
from transformers import Qwen3ForCausalLM

from tools.tiny.images import disturb_norms, qwen_image_parts
from tools.tiny.text import QWEN_CHAT, qwen3_encoder, qwen_tokenizer
from tools.tiny.vision import picture_processor


def build_qwen_image_edit(folder: Path, *, seed: int = 0) -> Path:
    """A Qwen-Image-Edit: its encoder sees the one picture."""
    return _qwen_image(folder, QwenImageEditPipeline, seed=seed)


def build_qwen_image_edit_plus(folder: Path, *, seed: int = 0) -> Path:
    """A Qwen-Image-Edit-2509: its encoder sees all pictures together."""
    return _qwen_image(folder, QwenImageEditPlusPipeline, seed=seed)


def build_qwen_image_layered(folder: Path, *, seed: int = 0) -> Path:
    """A Qwen-Image-Layered: pictures with alpha, one beside the other."""
    return _qwen_image(
        folder, QwenImageLayeredPipeline, seed=seed, channels=4, use_additional_t_cond=True, use_layer3d_rope=True
    )


def build_flux2_klein(folder: Path, *, seed: int = 0) -> Path:
    """A FLUX.2 Klein: several pictures in one sequence, text from three layers of a language model."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = QWEN_CHAT
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = Flux2KleinPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential"),
            vae=AutoencoderKLFlux2(
                block_out_channels=(8, 16, 16, 16), layers_per_block=1, norm_num_groups=4, latent_channels=32
            ),
            text_encoder=qwen3_encoder(tokenizer, layers=28, kind=Qwen3ForCausalLM),
            tokenizer=tokenizer,
            transformer=Flux2Transformer(
                in_channels=128,
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=32,
                num_attention_heads=4,
                joint_attention_dim=192,
                axes_dims_rope=(8, 8, 8, 8),
                guidance_embeds=False,
            ),
        )
    pipeline.save_pretrained(folder)
    return folder


def _qwen_image(folder: Path, kind: type[DiffusionPipeline], *, seed: int, **parts: object) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = qwen_image_parts(**parts)
        pipeline = kind(**made, processor=picture_processor(made["tokenizer"]))
        disturb_norms(pipeline.transformer)
    pipeline.save_pretrained(folder)
    return folder
