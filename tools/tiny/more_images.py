"""Tiny pipelines for pictures with other encoders: SD3.5, HiDream, Ovis, LongCat, ERNIE, FLUX.2-dev."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLFlux2,
    DiffusionPipeline,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    LongCatImageEditPipeline,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers import Flux2Transformer2DModel as Flux2Transformer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral3Model,
    Qwen2Tokenizer,
)

from tools.tiny.images import disturb_norms, qwen_image_parts, small_vae
from tools.tiny.text import (
    QWEN_CHAT,
    clip_encoder,
    clip_tokenizer,
    qwen3_encoder,
    qwen_tokenizer,
    t5_encoder,
    t5_tokenizer,
)
from tools.tiny.vision import picture_processor

PARTS_CHAT = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- for part in message.content %}{{ part.text }}{%- endfor %}<|im_end|>\n{%- endfor %}"
)
"""Turns that are made of parts, of which each is a text."""


def build_stable_diffusion3(folder: Path, *, seed: int = 0) -> Path:
    """A Stable Diffusion 3.5 medium: attention twice in its first block, norms of queries and keys."""
    first, second, t5 = clip_tokenizer(), clip_tokenizer(), t5_tokenizer(256)

    def make() -> DiffusionPipeline:
        return StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(
                sample_size=8,
                patch_size=2,
                in_channels=16,
                num_layers=3,
                attention_head_dim=16,
                num_attention_heads=4,
                joint_attention_dim=96,
                caption_projection_dim=64,
                pooled_projection_dim=64,
                out_channels=16,
                pos_embed_max_size=32,
                qk_norm="rms_norm",
                dual_attention_layers=(0,),
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=small_vae(latent=16, scaling=1.5305, shift=0.0609),
            text_encoder=clip_encoder(first, projection=32),
            tokenizer=first,
            text_encoder_2=clip_encoder(second, projection=32),
            tokenizer_2=second,
            text_encoder_3=t5_encoder(t5, width=96),
            tokenizer_3=t5,
        )

    return _saved(folder, make, seed)


def build_hidream(folder: Path, *, seed: int = 0) -> Path:
    """A HiDream-I1: four text encoders, experts, and two layers of Llama for its blocks."""
    first, second, t5, words = clip_tokenizer(), clip_tokenizer(), t5_tokenizer(128), qwen_tokenizer()
    words.pad_token = words.eos_token

    def make() -> DiffusionPipeline:
        llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(words),
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )
        return HiDreamImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=small_vae(latent=16, scaling=0.3611, shift=0.1159),
            text_encoder=clip_encoder(first, projection=32),
            tokenizer=first,
            text_encoder_2=clip_encoder(second, projection=32),
            tokenizer_2=second,
            text_encoder_3=t5_encoder(t5, width=64),
            tokenizer_3=t5,
            text_encoder_4=llama,
            tokenizer_4=words,
            transformer=HiDreamImageTransformer2DModel(
                patch_size=2,
                in_channels=16,
                out_channels=16,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=16,
                num_attention_heads=4,
                caption_channels=[64, 64],
                text_emb_dim=64,
                axes_dims_rope=(8, 4, 4),
                max_resolution=(16, 16),
                llama_layers=[1, 2],
            ),
        )

    return _saved(folder, make, seed)


def build_ovis_image(folder: Path, *, seed: int = 0) -> Path:
    """An Ovis-Image: a language model in place of CLIP and T5."""
    tokenizer = _chatting()

    def make() -> DiffusionPipeline:
        return OvisImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=small_vae(latent=16, scaling=0.3611, shift=0.1159),
            text_encoder=qwen3_encoder(tokenizer),
            tokenizer=tokenizer,
            transformer=OvisImageTransformer2DModel(
                in_channels=64,
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=4,
                joint_attention_dim=64,
                axes_dims_rope=(4, 6, 6),
            ),
        )

    return _saved(folder, make, seed)


def build_longcat_image(folder: Path, *, seed: int = 0) -> Path:
    """A LongCat-Image: quoted words are encoded letter by letter."""
    return _saved(folder, lambda: _longcat(LongCatImagePipeline), seed)


def build_longcat_image_edit(folder: Path, *, seed: int = 0) -> Path:
    """A LongCat-Image-Edit: its encoder sees the one picture."""
    return _saved(folder, lambda: _longcat(LongCatImageEditPipeline), seed)


def _longcat(kind: type[DiffusionPipeline]) -> DiffusionPipeline:
    qwen = qwen_image_parts()
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=small_vae(latent=16, scaling=0.3611, shift=0.1159),
        text_encoder=qwen["text_encoder"],
        tokenizer=qwen["tokenizer"],
        text_processor=picture_processor(qwen["tokenizer"]),
        transformer=LongCatImageTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            axes_dims_rope=[4, 6, 6],
        ),
    )


def build_ernie_image(folder: Path, *, seed: int = 0) -> Path:
    """An ERNIE-Image without the model that rewrites prompts."""
    tokenizer = qwen_tokenizer()

    def make() -> DiffusionPipeline:
        return ErnieImagePipeline(
            transformer=ErnieImageTransformer2DModel(
                hidden_size=64,
                num_attention_heads=4,
                num_layers=2,
                ffn_hidden_size=96,
                in_channels=128,
                out_channels=128,
                text_in_dim=64,
                rope_axes_dim=(4, 6, 6),
            ),
            vae=_flux2_vae(),
            text_encoder=Mistral3Model(_mistral(len(tokenizer), layers=3)),
            tokenizer=tokenizer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        )

    return _saved(folder, make, seed)


def build_flux2_dev(folder: Path, *, seed: int = 0) -> Path:
    """A FLUX.2-dev: embedded guidance, text from layers 10, 20 and 30 of Mistral, several pictures in one sequence."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = PARTS_CHAT

    def make() -> DiffusionPipeline:
        return Flux2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential"),
            vae=_flux2_vae(),
            text_encoder=Mistral3ForConditionalGeneration(_mistral(len(tokenizer), layers=30)),
            tokenizer=tokenizer,
            transformer=Flux2Transformer(
                in_channels=128,
                num_layers=1,
                num_single_layers=2,
                attention_head_dim=32,
                num_attention_heads=2,
                joint_attention_dim=192,
                axes_dims_rope=(8, 8, 8, 8),
                guidance_embeds=True,
            ),
        )

    return _saved(folder, make, seed)


def _flux2_vae() -> AutoencoderKLFlux2:
    return AutoencoderKLFlux2(
        block_out_channels=(8, 16, 16, 16), layers_per_block=1, norm_num_groups=4, latent_channels=32
    )


def _mistral(vocabulary: int, *, layers: int) -> Mistral3Config:
    return Mistral3Config(
        text_config={
            "model_type": "mistral",
            "vocab_size": vocabulary,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        image_token_index=vocabulary - 1,
    )


def _chatting() -> Qwen2Tokenizer:
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = QWEN_CHAT
    return tokenizer


def _saved(folder: Path, make: Callable[[], DiffusionPipeline], seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = make()
        disturb_norms(pipeline.transformer)
    pipeline.save_pretrained(folder)
    return folder
