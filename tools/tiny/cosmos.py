"""A tiny Cosmos3: one transformer that reads the prompt and predicts the video."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import Cosmos3OmniPipeline, Cosmos3OmniTransformer, UniPCMultistepScheduler

from tools.tiny.images import disturb_norms
from tools.tiny.text import QWEN_CHAT, qwen_tokenizer
from tools.tiny.videos import patched_vae


def build_cosmos3(folder: Path, *, seed: int = 0) -> Path:
    """A Cosmos3 without sound, actions and the safety checker, which needs a package of its own."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = QWEN_CHAT
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = Cosmos3OmniTransformer(
            dtype="float32",
            head_dim=16,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=4,
            num_hidden_layers=2,
            num_key_value_heads=2,
            vocab_size=len(tokenizer),
            rope_axes_dim=(4, 2, 2),
        )
        disturb_norms(transformer)
        pipeline = Cosmos3OmniPipeline(
            transformer=transformer,
            text_tokenizer=tokenizer,
            vae=patched_vae(),
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0, num_train_timesteps=1000
            ),
            enable_safety_checker=False,
        )
    pipeline.save_pretrained(folder)
    return folder
