"""Tiny pipelines that make images: Qwen-Image, Stable Diffusion 1.5 and XL, FLUX, Z-Image."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    PNDMScheduler,
    QwenImagePipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
)
from diffusers import FluxTransformer2DModel as FluxTransformer
from diffusers import QwenImageTransformer2DModel as QwenImageTransformer
from diffusers import ZImageTransformer2DModel as ZImageTransformer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from tools.tiny.text import (
    QWEN_CHAT,
    QWEN_SPECIAL,
    clip_encoder,
    clip_tokenizer,
    qwen3_encoder,
    qwen_tokenizer,
    t5_encoder,
    t5_tokenizer,
)


def build_qwen_image(folder: Path, *, seed: int = 0, heads: int = 4, head_dim: int = 32, layers: int = 2) -> Path:
    """A Qwen-Image of about 1.7 million parameters; the arguments shape the transformer alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = QwenImagePipeline(**qwen_image_parts(heads=heads, head_dim=head_dim, layers=layers))
        disturb_norms(pipeline.transformer)
    pipeline.save_pretrained(folder)
    return folder


def build_qwen_image_2512(folder: Path, *, seed: int = 0) -> Path:
    """A Qwen-Image-2512, in the form of the released one: weights in several files, configs of older libraries, which
    know fewer settings and keep those of the language model beside those of what it is in, and a VAE of other widths.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = qwen_image_parts(layers=3)
        parts["vae"] = AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2)
        pipeline = QwenImagePipeline(**parts)
        disturb_norms(pipeline.transformer)
    pipeline.save_pretrained(folder, max_shard_size="2MB")
    pipeline.text_encoder.save_pretrained(folder / "text_encoder", max_shard_size="100KB")
    (folder / "text_encoder" / "model.safetensors").unlink()
    _rewrite(
        folder / "transformer" / "config.json", without=("zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")
    )
    _rewrite(folder / "vae" / "config.json", without=("input_channels",))
    rope = {"rope_type": "default", "type": "default"}
    encoder = folder / "text_encoder" / "config.json"
    text = json.loads(encoder.read_text())["text_config"]
    theta, sections = text["rope_parameters"]["rope_theta"], text["rope_parameters"]["mrope_section"]
    old = {name: value for name, value in text.items() if name not in ("rope_parameters", "layer_types", "model_type")}
    old |= {"rope_theta": theta, "rope_scaling": {"mrope_section": sections, **rope}, "rms_norm_eps": 1e-06}
    _rewrite(encoder, without=("text_config",), **old)
    return folder


def _rewrite(config: Path, *, without: Sequence[str], **values: Any) -> None:
    """Changes a config as another version of a library would have written it."""
    held = json.loads(config.read_text())
    kept = {name: value for name, value in held.items() if name not in without}
    config.write_text(json.dumps(kept | values, indent=2))


def qwen_image_parts(
    *, heads: int = 4, head_dim: int = 32, layers: int = 2, channels: int = 3, **transformer: Any
) -> dict[str, Any]:
    """What all Qwen-Image pipelines are made of. `channels` of a picture are 4 where it has layers."""
    tokenizer = qwen_tokenizer()
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256,
            base_shift=0.5,
            max_image_seq_len=8192,
            max_shift=0.9,
            shift_terminal=0.02,
            use_dynamic_shifting=True,
        ),
        "vae": AutoencoderKLQwenImage(
            base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1, input_channels=channels
        ),
        "text_encoder": _qwen_text_encoder(tokenizer),
        "tokenizer": tokenizer,
        "transformer": QwenImageTransformer(
            num_layers=layers,
            attention_head_dim=head_dim,
            num_attention_heads=heads,
            joint_attention_dim=64,
            axes_dims_rope=axes(head_dim),
            **transformer,
        ),
    }


def build_stable_diffusion(folder: Path, *, seed: int = 0, kind: type[DiffusionPipeline] | None = None) -> Path:
    """A Stable Diffusion 1.5: a UNet with cross-attention, PNDM. `kind` is another pipeline over the same parts."""
    tokenizer = clip_tokenizer()
    channels = 9 if kind is StableDiffusionInpaintPipeline else 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = (kind or StableDiffusionPipeline)(
            vae=small_vae(latent=4, scaling=0.18215),
            text_encoder=clip_encoder(tokenizer),
            tokenizer=tokenizer,
            unet=UNet2DConditionModel(
                sample_size=8,
                in_channels=channels,
                block_out_channels=(16, 32),
                layers_per_block=1,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
                cross_attention_dim=32,
                attention_head_dim=4,
                norm_num_groups=4,
            ),
            scheduler=PNDMScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                skip_prk_steps=True,
                set_alpha_to_one=False,
                steps_offset=1,
            ),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.save_pretrained(folder)
    return folder


def build_stable_diffusion_img2img(folder: Path, *, seed: int = 0) -> Path:
    return build_stable_diffusion(folder, seed=seed, kind=StableDiffusionImg2ImgPipeline)


def build_stable_diffusion_inpaint(folder: Path, *, seed: int = 0) -> Path:
    return build_stable_diffusion(folder, seed=seed, kind=StableDiffusionInpaintPipeline)


def build_stable_diffusion_xl(folder: Path, *, seed: int = 0) -> Path:
    """An SDXL: two text encoders, the size among the conditions."""
    tokenizer = clip_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusionXLPipeline(
            vae=small_vae(latent=4, scaling=0.13025),
            text_encoder=clip_encoder(tokenizer),
            text_encoder_2=clip_encoder(tokenizer, projection=32),
            tokenizer=tokenizer,
            tokenizer_2=clip_tokenizer(),
            unet=UNet2DConditionModel(
                sample_size=8,
                block_out_channels=(16, 32),
                layers_per_block=1,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
                cross_attention_dim=64,
                attention_head_dim=(2, 4),
                transformer_layers_per_block=(1, 2),
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=32 + 6 * 8,
                norm_num_groups=4,
            ),
            scheduler=EulerDiscreteScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                steps_offset=1,
                timestep_spacing="leading",
            ),
            force_zeros_for_empty_prompt=True,
            add_watermarker=False,
        )
    pipeline.save_pretrained(folder)
    return folder


def build_flux(folder: Path, *, seed: int = 0, heads: int = 4, head_dim: int = 32, layers: int = 2) -> Path:
    """A FLUX.1-dev with its embedded guidance."""
    return _flux(folder, FluxPipeline, seed=seed, heads=heads, head_dim=head_dim, layers=layers)


def build_flux_schnell(folder: Path, *, seed: int = 0, heads: int = 4, head_dim: int = 32, layers: int = 2) -> Path:
    """A FLUX.1-schnell: no guidance, and a shift that does not depend on the size."""
    return _flux(folder, FluxPipeline, seed=seed, heads=heads, head_dim=head_dim, layers=layers, schnell=True)


def build_flux_kontext(folder: Path, *, seed: int = 0, heads: int = 4, head_dim: int = 32, layers: int = 2) -> Path:
    """A FLUX.1-Kontext-dev: a dev that is also shown a picture."""
    return _flux(folder, FluxKontextPipeline, seed=seed, heads=heads, head_dim=head_dim, layers=layers)


def _flux(folder: Path, kind: type[DiffusionPipeline], *, seed: int, **shape: Any) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = kind(**flux_parts(**shape), image_encoder=None, feature_extractor=None)
        disturb_norms(pipeline.transformer)
    pipeline.save_pretrained(folder)
    return folder


def flux_parts(*, heads: int = 4, head_dim: int = 32, layers: int = 2, schnell: bool = False) -> dict[str, Any]:
    """What all FLUX.1 pipelines are made of."""
    clip, t5 = clip_tokenizer(), t5_tokenizer(512)
    shift: dict[str, Any] = {"shift": 1.0} if schnell else {"shift": 3.0, "use_dynamic_shifting": True}
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(base_image_seq_len=256, max_image_seq_len=4096, **shift),
        "vae": small_vae(latent=16, scaling=0.3611, shift=0.1159),
        "text_encoder": clip_encoder(clip),
        "tokenizer": clip,
        "text_encoder_2": t5_encoder(t5),
        "tokenizer_2": t5,
        "transformer": FluxTransformer(
            patch_size=1,
            in_channels=64,
            num_layers=layers,
            num_single_layers=layers,
            attention_head_dim=head_dim,
            num_attention_heads=heads,
            joint_attention_dim=64,
            pooled_projection_dim=32,
            guidance_embeds=not schnell,
            axes_dims_rope=axes(head_dim),
        ),
    }


def build_z_image(folder: Path, *, seed: int = 0, heads: int = 6, head_dim: int = 16, layers: int = 2) -> Path:
    """A Z-Image: one stream, an LLM that reads the prompt as a chat. With a multiple of 3 heads, ranks can share the
    channels of its feed-forward.
    """
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = QWEN_CHAT
    time_axis = head_dim // 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=small_vae(latent=16, scaling=0.3611, shift=0.1159),
            text_encoder=qwen3_encoder(tokenizer),
            tokenizer=tokenizer,
            transformer=ZImageTransformer(
                in_channels=16,
                dim=heads * head_dim,
                n_layers=layers,
                n_refiner_layers=1,
                n_heads=heads,
                n_kv_heads=heads,
                cap_feat_dim=64,
                axes_dims=[time_axis, (head_dim - time_axis) // 2, (head_dim - time_axis) // 2],
                axes_lens=[1024, 64, 64],
            ),
        )
        disturb_norms(pipeline.transformer)
        for token in (pipeline.transformer.x_pad_token, pipeline.transformer.cap_pad_token):
            torch.nn.init.normal_(token)  # zeros in a new model, but not in a trained one
    pipeline.save_pretrained(folder)
    return folder


def axes(head_dim: int) -> tuple[int, int, int]:
    """A head split over time, height and width in the proportion of 16, 56 and 56 of 128."""
    time_axis = max(2, head_dim // 8 // 2 * 2)
    return (time_axis, (head_dim - time_axis) // 2, (head_dim - time_axis) // 2)


def disturb_norms(module: torch.nn.Module) -> None:
    """Norm weights start as ones, all alike: a model that mixed two of them up would not be found out."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)


def small_vae(*, latent: int, scaling: float, shift: float | None = None) -> AutoencoderKL:
    """An autoencoder with eight pixels for each latent one, as in the real ones."""
    quant = latent == 4
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=latent,
        sample_size=64,
        scaling_factor=scaling,
        shift_factor=shift,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
        force_upcast=False,
    )


def _qwen_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    ids = dict(zip(QWEN_SPECIAL, tokenizer.convert_tokens_to_ids(list(QWEN_SPECIAL)), strict=True))
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "window_size": 112,
            "fullatt_block_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config)
