"""A tiny GLM-Image: a language model writes the tokens of a picture, which a transformer then draws in detail."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    GlmImagePipeline,
    GlmImageTransformer2DModel,
)
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

from tools.tiny.images import disturb_norms, small_vae
from tools.tiny.text import SENTENCES, t5_encoder

PICTURE_TOKENS = 64
"""The codebook; the ids behind it begin and end a picture."""

PATCH = 32
"""Pixels to a token along an edge; the transformer has one for each 16."""

SPECIAL = ("<unk>", "<pad>", "<|image|>", "<sop>", "<eop>", "<|user|>", "<|assistant|>")
CHAT = (
    "{%- for message in messages %}<|user|>"
    "{%- for part in message.content %}{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}"
    "{%- endfor %}{%- endfor %}<|assistant|>"
)


def build_glm_image(folder: Path, *, seed: int = 0) -> Path:
    """Everything with one or two layers. The language model sees a picture that is to be edited, too."""
    tokenizer, letters = _tokenizer(), ByT5Tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = GlmImageTransformer2DModel(
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            text_embed_dim=32,
            time_embed_dim=32,
            condition_dim=16,
            prior_vq_quantizer_codebook_size=PICTURE_TOKENS,
        )
        disturb_norms(transformer)
        vae = small_vae(latent=16, scaling=1.0)
        vae.register_to_config(
            latents_mean=[0.02 * channel - 0.2 for channel in range(16)],
            latents_std=[0.8 + 0.02 * channel for channel in range(16)],
        )
        pipeline = GlmImagePipeline(
            tokenizer=letters,
            processor=GlmImageProcessor(
                GlmImageImageProcessorPil(
                    size={"shortest_edge": 64, "longest_edge": 64},
                    patch_size=PATCH,
                    merge_size=1,
                    temporal_patch_size=1,
                ),
                tokenizer,
                chat_template=CHAT,
            ),
            text_encoder=t5_encoder(letters, width=32),
            vision_language_encoder=_writer(tokenizer),
            vae=vae,
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75),
        )
    pipeline.save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """Tokens of pictures come first, as the language model writes them, then whole words."""
    pictures = [f"<|dit_token_{place}|>" for place in range(PICTURE_TOKENS + 2)]
    words = sorted({word for sentence in SENTENCES for word in sentence.split()} | set(map(str, range(100))))
    vocab = {word: place for place, word in enumerate((*pictures, *SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (*pictures, *SPECIAL)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token=pictures[PICTURE_TOKENS],
        padding_side="left",
        extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
    )


def _writer(tokenizer: PreTrainedTokenizerFast) -> GlmImageForConditionalGeneration:
    begin, end = PICTURE_TOKENS, PICTURE_TOKENS + 1
    config = GlmImageConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vision_vocab_size": PICTURE_TOKENS + 2,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": end,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "image_size": 64,
            "patch_size": PATCH,
        },
        vq_config={"embed_dim": 16, "num_embeddings": PICTURE_TOKENS, "latent_channels": 32},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        image_start_token_id=begin,
        image_end_token_id=end,
    )
    writer = GlmImageForConditionalGeneration(config)
    # a picture has as many tokens as its size asks for; random weights would end it anywhere
    writer.generation_config.suppress_tokens = [begin, end]
    return writer
