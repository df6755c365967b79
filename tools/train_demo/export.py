"""Makes a checkpoint of a trained state, in the layout that diffusers, transformers and omni_grpc load.

    python -m tools.train_demo.export STATE FOLDER

The same state gives the same files. The denoiser is kept in the precision that the state has, and the VAE in float16,
which keeps three bits more than bfloat16: what that costs is measured on scenes, and stands in the card.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from omni_grpc.checkpoint.layout import PREFERENCES
from omni_grpc.config.command_line import Parser
from tools.tiny.text import QWEN_SPECIAL
from tools.train_demo import card, denoiser
from tools.train_demo.autoencoder import CONFIG, flat
from tools.train_demo.colours import latent_rgb, repainted
from tools.train_demo.loop import SHIFT
from tools.train_demo.words import tokenizer

LARGEST = 12_000_000
"""Bytes of all files together: they come with every installation."""
DEFAULTS: Mapping[str, Any] = {
    "width": 128,
    "height": 128,
    "steps": 20,
    "negative_prompt": "",
    "guidance": {"true_cfg_scale": 4.0, "norm": "RENORM"},
}


def export(state: Path, folder: Path) -> Path:
    """Raises ValueError for a state that lacks weights, or makes more than LARGEST bytes."""
    log = json.loads((state / "log.json").read_text(encoding="utf-8"))
    weights = load_file(state / "average.safetensors")
    parts = {name: _part(weights, f"{name}.") for name in ("text_encoder", "transformer")}
    words = tokenizer()
    vae = autoencoder(load_file(state / "vae.safetensors"), log["scaling"])
    preferences = {"defaults": DEFAULTS, "latent_rgb": latent_rgb(vae)}
    psnr = {"float32": repainted(vae), "float16": repainted(vae.half().float())}
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae.half(),
        text_encoder=text_encoder(words, parts["text_encoder"]),
        tokenizer=words,
        transformer=transformer(parts["transformer"]),
    )
    pipeline.save_pretrained(folder)
    (folder / PREFERENCES).write_text(json.dumps(preferences, indent=2) + "\n", encoding="utf-8")
    parameters = {name: sum(p.numel() for p in pipeline.components[name].parameters()) for name in card.COMPONENTS}
    (folder / "README.md").write_text(card.text(log, DEFAULTS, parameters, psnr), encoding="utf-8")
    if (size := sum(file.stat().st_size for file in files(folder))) > LARGEST:
        raise ValueError(f"{folder} has {size} bytes, {size - LARGEST} more than there should be")
    return folder


def transformer(weights: Mapping[str, Tensor]) -> QwenImageTransformer2DModel:
    made = QwenImageTransformer2DModel(
        num_layers=denoiser.LAYERS,
        attention_head_dim=denoiser.HEAD,
        num_attention_heads=denoiser.HEADS,
        joint_attention_dim=denoiser.TEXT_CHANNELS,
        axes_dims_rope=denoiser.AXES,
    )
    made.load_state_dict(weights)
    return made.to(_dtype(weights))


def text_encoder(words: Qwen2Tokenizer, weights: Mapping[str, Tensor]) -> Qwen2_5_VLForConditionalGeneration:
    """What the state lacks is zeros: the tower that nobody shows a picture, as small as it can be. The head that nobody
    asks for a word is the embedding.
    """
    special = {name: words.convert_tokens_to_ids(name) for name in QWEN_SPECIAL}
    config = Qwen2_5_VLConfig(
        text_config=denoiser.text_config(len(words), special),
        vision_config={
            "depth": 1,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_heads": 2,
            "patch_size": 2,
            "spatial_merge_size": 1,
            "temporal_patch_size": 1,
            "out_hidden_size": denoiser.TEXT_CHANNELS,
            "window_size": 4,
            "fullatt_block_indexes": [0],
        },
        image_token_id=special["<|image_pad|>"],
        video_token_id=special["<|video_pad|>"],
        vision_start_token_id=special["<|vision_start|>"],
        vision_end_token_id=special["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    made = Qwen2_5_VLForConditionalGeneration(config)
    made.model.language_model.load_state_dict(weights)
    for parameter in made.model.visual.parameters():
        torch.nn.init.zeros_(parameter)
    return made.to(_dtype(weights))


def autoencoder(weights: Mapping[str, Tensor], scaling: Mapping[str, list[float]]) -> AutoencoderKLQwenImage:
    """With zeros where a kernel would look at the frames before: one frame has none, and zeros take no room in an
    archive.
    """
    made = AutoencoderKLQwenImage(**CONFIG, latents_mean=scaling["mean"], latents_std=scaling["std"])
    made.load_state_dict(weights)
    for part in made.modules():
        if isinstance(part, QwenImageCausalConv3d):
            part.weight.data[:, :, :-1] = 0
    flat(made)  # what is measured here takes a third of the time
    return made.eval().requires_grad_(False)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def digest(folder: Path) -> str:
    """SHA-256 over the names and the contents of all files."""
    found = hashlib.sha256()
    for path in files(folder):
        found.update(f"{path.relative_to(folder).as_posix()}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _part(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    part = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
    if not part:
        raise ValueError(f"the state has no {prefix}* weights")
    return part


def _dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    (dtype,) = {x.dtype for x in weights.values()}
    return dtype


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("state", type=Path, metavar="STATE")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    export(args.state, args.folder)
    for path in files(args.folder):
        print(f"{path.stat().st_size:>10}  {path.relative_to(args.folder)}")
    print(f"{sum(path.stat().st_size for path in files(args.folder)):>10}  in all, sha256 {digest(args.folder)}")


if __name__ == "__main__":
    main()
