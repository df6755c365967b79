"""A tiny pipeline that makes videos with their sound: LTX-2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

from tools.tiny.text import gemma_encoder, gemma_tokenizer

MELS = 16
"""Bands of the spectrogram, of which four make one in the latents."""
SOUND_CHANNELS = 2
SOUND_WIDTH = MELS // 4 * SOUND_CHANNELS


def build_ltx2(folder: Path, *, seed: int = 0) -> Path:
    """An LTX-2: two streams that see each other, 32 pixels and 8 frames to a latent, stereo at 8 kHz."""
    return _ltx2(folder, seed, connectors={}, transformer={})


def build_ltx2_3(folder: Path, *, seed: int = 0) -> Path:
    """An LTX-2.3: gated attention, modulated cross attention, a projection of the text for each of the two streams."""
    return _ltx2(
        folder,
        seed,
        connectors={
            "per_modality_projections": True,
            "video_gated_attn": True,
            "audio_gated_attn": True,
            "video_hidden_dim": 32,
            "audio_hidden_dim": 32,
            "proj_bias": True,
            "rope_type": "split",
        },
        transformer={
            "gated_attn": True,
            "cross_attn_mod": True,
            "audio_gated_attn": True,
            "audio_cross_attn_mod": True,
            "use_prompt_embeddings": False,
            "perturbed_attn": True,
            "rope_type": "split",
        },
    )


def _ltx2(folder: Path, seed: int, *, connectors: Mapping[str, Any], transformer: Mapping[str, Any]) -> Path:
    tokenizer = gemma_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = LTX2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                base_image_seq_len=1024,
                base_shift=0.95,
                max_image_seq_len=4096,
                max_shift=2.05,
                shift_terminal=0.1,
                use_dynamic_shifting=True,
            ),
            vae=AutoencoderKLLTX2Video(
                latent_channels=16,
                block_out_channels=(8, 8, 8, 8),
                decoder_block_out_channels=(8, 16, 32),
                layers_per_block=(1, 1, 1, 1, 1),
                decoder_layers_per_block=(1, 1, 1, 1),
                spatial_compression_ratio=32,
                temporal_compression_ratio=8,
            ),
            audio_vae=AutoencoderKLLTX2Audio(
                base_channels=SOUND_WIDTH,
                ch_mult=(1, 1, 1),
                num_res_blocks=1,
                latent_channels=SOUND_CHANNELS,
                mel_bins=MELS,
            ),
            text_encoder=gemma_encoder(tokenizer),
            tokenizer=tokenizer,
            connectors=LTX2TextConnectors(
                caption_channels=32,
                text_proj_in_factor=3,
                video_connector_num_attention_heads=2,
                video_connector_attention_head_dim=16,
                video_connector_num_layers=1,
                audio_connector_num_attention_heads=2,
                audio_connector_attention_head_dim=16,
                audio_connector_num_layers=1,
                **connectors,
            ),
            transformer=LTX2VideoTransformer3DModel(
                in_channels=16,
                out_channels=16,
                num_attention_heads=2,
                attention_head_dim=16,
                cross_attention_dim=32,
                audio_in_channels=SOUND_WIDTH,
                audio_out_channels=SOUND_WIDTH,
                audio_num_attention_heads=2,
                audio_attention_head_dim=16,
                audio_cross_attention_dim=32,
                num_layers=2,
                caption_channels=32,
                **transformer,
            ),
            vocoder=LTX2Vocoder(
                in_channels=2 * MELS,
                hidden_channels=16,
                out_channels=2,
                upsample_kernel_sizes=[15, 8, 8],
                upsample_factors=[5, 4, 4],
                resnet_kernel_sizes=[3],
                resnet_dilations=[[1, 3, 5]],
                output_sampling_rate=8000,
            ),
        )
    pipeline.save_pretrained(folder)
    return folder
