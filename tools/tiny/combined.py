"""A tiny pipeline of two: Kandinsky 2.2, whose prior makes the embedding of a picture that its decoder paints."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    DDIMScheduler,
    KandinskyV22CombinedPipeline,
    PriorTransformer,
    UnCLIPScheduler,
    UNet2DConditionModel,
    VQModel,
)
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

from tools.tiny.text import clip_encoder, clip_tokenizer

WIDTH = 32
"""Of an embedding."""


def build_kandinsky(folder: Path, *, seed: int = 0) -> Path:
    tokenizer = clip_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = KandinskyV22CombinedPipeline(
            prior_prior=PriorTransformer(
                num_attention_heads=2, attention_head_dim=12, embedding_dim=WIDTH, num_layers=1
            ),
            prior_text_encoder=clip_encoder(tokenizer, hidden=WIDTH, projection=WIDTH),
            prior_tokenizer=tokenizer,
            prior_image_encoder=CLIPVisionModelWithProjection(
                CLIPVisionConfig(
                    hidden_size=32,
                    intermediate_size=32,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    image_size=28,
                    patch_size=14,
                    projection_dim=WIDTH,
                )
            ),
            prior_image_processor=CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28),
            prior_scheduler=UnCLIPScheduler(
                variance_type="fixed_small_log", prediction_type="sample", clip_sample=True, clip_sample_range=10.0
            ),
            unet=UNet2DConditionModel(
                sample_size=8,
                in_channels=4,
                out_channels=8,
                addition_embed_type="image",
                down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
                mid_block_type="UNetMidBlock2DSimpleCrossAttn",
                up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
                block_out_channels=(16, 32),
                layers_per_block=1,
                norm_num_groups=4,
                cross_attention_dim=32,
                attention_head_dim=4,
                encoder_hid_dim=WIDTH,
                encoder_hid_dim_type="image_proj",
                resnet_time_scale_shift="scale_shift",
            ),
            scheduler=DDIMScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="linear",
                clip_sample=False,
                set_alpha_to_one=False,
                steps_offset=1,
            ),
            movq=VQModel(
                block_out_channels=(32, 32),
                down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
                up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
                latent_channels=4,
                layers_per_block=1,
                norm_num_groups=4,
                norm_type="spatial",
                num_vq_embeddings=12,
                vq_embed_dim=4,
            ),
        )
    pipeline.save_pretrained(folder)
    return folder
