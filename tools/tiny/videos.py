"""Tiny pipelines that make videos and sound: Wan2.2 with two experts, LTX, Stable Audio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    AutoencoderOobleck,
    CosineDPMSolverMultistepScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    LTXConditionPipeline,
    LTXPipeline,
    StableAudioPipeline,
    StableAudioProjectionModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanVACEPipeline,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from diffusers import LTXVideoTransformer3DModel as LTXTransformer
from diffusers import StableAudioDiTModel as StableAudioTransformer
from diffusers import WanTransformer3DModel as WanTransformer

from tools.tiny.images import disturb_norms
from tools.tiny.text import t5_encoder, t5_tokenizer


def build_wan_t2v(folder: Path, *, seed: int = 0) -> Path:
    """A Wan2.2 T2V-A14B: two experts, the second from 0.875 of the noise on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = WanPipeline(**_wan_parts(in_channels=16), boundary_ratio=0.875)
    pipeline.save_pretrained(folder)
    return folder


def build_wan_single(folder: Path, *, seed: int = 0) -> Path:
    """A Wan2.1 T2V: one transformer, Euler instead of UniPC."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = _wan_parts(in_channels=16) | {"scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0)}
        pipeline = WanPipeline(**parts | {"transformer_2": None})
    pipeline.save_pretrained(folder)
    return folder


def build_wan_ti2v(folder: Path, *, seed: int = 0, kind: type[DiffusionPipeline] = WanPipeline) -> Path:
    """A Wan2.2 TI2V-5B: one transformer, timesteps by token, a VAE of 48 channels with patches and 16 pixels to a
    latent. diffusers makes videos of pictures with it under another pipeline, which is `kind`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = _wan_parts(in_channels=48, out_channels=48) | {"vae": patched_vae(), "transformer_2": None}
        pipeline = kind(**parts, expand_timesteps=True)
    pipeline.save_pretrained(folder)
    return folder


def build_wan_ti2v_i2v(folder: Path, *, seed: int = 0) -> Path:
    return build_wan_ti2v(folder, seed=seed, kind=WanImageToVideoPipeline)


def build_wan_i2v(folder: Path, *, seed: int = 0) -> Path:
    """A Wan2.2 I2V-A14B: the first frame and its mask come as further channels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = WanImageToVideoPipeline(
            **_wan_parts(in_channels=36), image_encoder=None, image_processor=None, boundary_ratio=0.9
        )
    pipeline.save_pretrained(folder)
    return folder


def build_wan_v2v(folder: Path, *, seed: int = 0) -> Path:
    """A Wan2.1 that starts from a video."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = _wan_parts(in_channels=16)
        del parts["transformer_2"]
        pipeline = WanVideoToVideoPipeline(**parts)
    pipeline.save_pretrained(folder)
    return folder


def build_wan_vace(folder: Path, *, seed: int = 0) -> Path:
    """A Wan2.1 VACE: a video with a mask, or pictures of what is to appear, beside the latents."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = _wan_parts(in_channels=16)
        del parts["transformer_2"]
        shape = _wan_shape(in_channels=16)
        parts["transformer"] = WanVACETransformer3DModel(**shape, vace_layers=[0], vace_in_channels=96)
        pipeline = WanVACEPipeline(**parts)
    pipeline.save_pretrained(folder)
    return folder


def build_ltx(folder: Path, *, seed: int = 0) -> Path:
    """An LTX: packed latents, 32 pixels and 8 frames for each."""
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=1024,
        base_shift=0.95,
        max_image_seq_len=4096,
        max_shift=2.05,
        shift_terminal=0.1,
        use_dynamic_shifting=True,
    )
    return _build_ltx(folder, LTXPipeline, scheduler, seed=seed)


def build_ltx_condition(folder: Path, *, seed: int = 0) -> Path:
    """An LTX 0.9.5, which starts from pictures or videos: its schedule is fixed."""
    return _build_ltx(folder, LTXConditionPipeline, FlowMatchEulerDiscreteScheduler(), seed=seed)


def _build_ltx(
    folder: Path, kind: type[DiffusionPipeline], scheduler: FlowMatchEulerDiscreteScheduler, *, seed: int
) -> Path:
    tokenizer = t5_tokenizer(128)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = kind(
            scheduler=scheduler,
            vae=AutoencoderKLLTXVideo(
                latent_channels=16,
                block_out_channels=(8, 8, 8, 8),
                decoder_block_out_channels=(8, 8, 8, 8),
                layers_per_block=(1, 1, 1, 1, 1),
                decoder_layers_per_block=(1, 1, 1, 1, 1),
                encoder_causal=True,
                decoder_causal=False,
            ),
            text_encoder=t5_encoder(tokenizer),
            tokenizer=tokenizer,
            transformer=LTXTransformer(
                in_channels=16,
                out_channels=16,
                num_attention_heads=4,
                attention_head_dim=16,
                cross_attention_dim=64,
                num_layers=2,
                caption_channels=64,
            ),
        )
    pipeline.save_pretrained(folder)
    return folder


def build_stable_audio(folder: Path, *, seed: int = 0) -> Path:
    """A Stable Audio Open: stereo at 8 kHz, just over a second."""
    tokenizer = t5_tokenizer(64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableAudioPipeline(
            vae=AutoencoderOobleck(
                encoder_hidden_size=8,  # mean and scale of the 4 latents below
                downsampling_ratios=[4, 8],
                decoder_channels=4,
                decoder_input_channels=4,
                audio_channels=2,
                channel_multiples=[2, 4],
                sampling_rate=8000,
            ),
            text_encoder=t5_encoder(tokenizer, width=32),
            projection_model=StableAudioProjectionModel(
                text_encoder_dim=32, conditioning_dim=32, min_value=0, max_value=32
            ),
            tokenizer=tokenizer,
            transformer=StableAudioTransformer(
                sample_size=320,
                in_channels=4,
                out_channels=4,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=4,
                num_key_value_attention_heads=2,
                cross_attention_dim=32,
                cross_attention_input_dim=32,
                global_states_input_dim=64,
                time_proj_dim=8,
            ),
            scheduler=CosineDPMSolverMultistepScheduler(solver_order=2, prediction_type="v_prediction", sigma_data=1.0),
        )
    pipeline.save_pretrained(folder)
    return folder


def patched_vae() -> AutoencoderKLWan:
    """That of Wan2.2 TI2V-5B and Cosmos3: 48 channels, 16 pixels and 4 frames to a latent."""
    return AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=48,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=4,
        scale_factor_spatial=16,
        latents_mean=[0.02 * channel - 0.5 for channel in range(48)],
        latents_std=[0.5 + 0.02 * channel for channel in range(48)],
    )


def _wan_parts(*, in_channels: int, out_channels: int = 16) -> dict[str, Any]:
    tokenizer = t5_tokenizer(512)
    return {
        "tokenizer": tokenizer,
        "text_encoder": t5_encoder(tokenizer, multilingual=True),
        "vae": AutoencoderKLWan(
            base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        "transformer": _wan_transformer(in_channels, out_channels),
        "transformer_2": _wan_transformer(in_channels, out_channels),
    }


def _wan_transformer(in_channels: int, out_channels: int) -> WanTransformer:
    transformer = WanTransformer(**_wan_shape(in_channels, out_channels))
    disturb_norms(transformer)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            # 512 tokens of text, nearly all of them zeros, are as good as no text to attention that starts out even
            if (".attn2." in name and parameter.dim() == 1) or ".attn2.to_out" in name:
                parameter *= 2
    return transformer


def _wan_shape(in_channels: int, out_channels: int = 16) -> dict[str, Any]:
    return {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": in_channels,
        "out_channels": out_channels,
        "text_dim": 64,
        "freq_dim": 64,
        "ffn_dim": 128,
        "num_layers": 2,
    }
