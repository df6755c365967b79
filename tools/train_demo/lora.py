"""Trains a LoRA that teaches the bundled model a word which it does not know: a ninth shape, or another colour.

    python -m tools.train_demo.lora arrow examples/lora/arrow.safetensors
    python -m tools.train_demo.lora brown examples/lora/brown.safetensors

One CPU core is enough, for some 20 minutes if nothing else runs; 450 steps are too few, with 1 caption of 8 correct.
Two captions in three have the new word. The others do not, and their target is what the model predicts without the
adapter, so that it keeps what it knows; made-up words in some of them tell it that not every strange word is the new
one. Only linear layers of the transformer's blocks are trained. The text encoder stays as it is; it spells the word in
bytes.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import Qwen2Tokenizer

from omni_grpc.config import BUNDLED
from omni_grpc.config.command_line import Parser
from omni_grpc.loading.adapters.files import METADATA
from omni_grpc.scenes.captions import say
from omni_grpc.scenes.layout import arrange, paint
from omni_grpc.scenes.shapes import COLOURS, NEW_COLOURS, NEW_SHAPES, SHAPES
from omni_grpc.scenes.wish import Wish, draw_new, draw_wish
from tools.train_demo.autoencoder import flat
from tools.train_demo.denoiser import TextEncoder, Transformer, rope
from tools.train_demo.loop import DROPOUT, SHIFT
from tools.train_demo.pool import TEXT, encode
from tools.train_demo.words import tokenizer

EDGE = 128
TOKENS = EDGE // 16
TARGETS = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
)
WARM_UP = 40
MADE_UP = 0.4
"""Share of captions without the new word that get a made-up one."""
LOGGED = 50
CONSONANTS = "bcdfghjklmnprstvwz"


class LowRank(nn.Module):
    """A weight [out, in] plus scale * up [out, r] @ down [r, in]; up begins as zeros."""

    def __init__(self, weight: Tensor, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.down = nn.Parameter(torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return torch.addmm(weight, self.up, self.down, alpha=self.scale)


def train(args: argparse.Namespace) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The factors by PEFT's names, and a record of the training. The same arguments give the same ones, but for the
    rounding of another processor or number of threads.
    """
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    words = tokenizer()
    new = scenes(words, args.word, args.scenes, args.seed)
    known = scenes(words, None, args.scenes // 2, args.seed + 1)
    empty = text_states(words, [""])
    teacher, table = transformer(), rope(TEXT, TOKENS, TOKENS)
    model = copy.deepcopy(teacher)
    factors = attach(model, args.rank, args.alpha / args.rank, generator)
    optimizer = torch.optim.AdamW(
        [p for x in factors.values() for p in x.parameters()], args.rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    count = args.batch * 2 // 3
    records, losses, began = [], [], time.monotonic()
    for step in range(args.steps):
        share = step / args.steps
        fall = 0.5 * (1 + math.cos(math.pi * share))
        optimizer.param_groups[0]["lr"] = args.rate * min(1.0, (step + 1) / WARM_UP) * fall
        mine = torch.randint(len(new[0]), (count,), generator=generator)
        theirs = torch.randint(len(known[0]), (args.batch - count,), generator=generator)
        clean, text, lengths = (torch.cat([a[mine], b[theirs]]) for a, b in zip(new, known, strict=True))
        # captions that are dropped teach nothing new: guidance starts from the same prediction as before
        dropped = torch.rand(args.batch - count, generator=generator) < 3 * DROPOUT
        text[count:][dropped], lengths[count:][dropped] = empty[0][0], empty[1][0]
        uniform = torch.rand(args.batch, generator=generator)
        t = SHIFT * uniform / (1 + (SHIFT - 1) * uniform)
        noise = torch.randn(clean.shape, generator=generator)
        noised = torch.lerp(clean, noise, t[:, None, None])
        inputs = _inputs(noised, t, text, lengths, table)
        target = noise - clean
        with torch.inference_mode():
            target[count:] = teacher(*_inputs(*(x[count:] for x in (noised, t, text, lengths)), table))
        loss = (model(*inputs) - target).pow(2).mean((1, 2))
        optimizer.zero_grad(set_to_none=True)
        loss.mean().backward()
        optimizer.step()
        losses.append((loss[:count].mean().item(), loss[count:].mean().item()))
        if (step + 1) % LOGGED == 0:
            means = np.array(losses).mean(0)
            losses.clear()
            records.append({"step": step + 1, "loss": float(means[0]), "loss_known": float(means[1])})
            seconds = time.monotonic() - began
            print(f"{step + 1}: loss {means[0]:.4f}, of what is known {means[1]:.5f}, {seconds:.0f} s", flush=True)
    tensors = {}
    for name, low in factors.items():
        if not low.up.any():
            continue  # what the last block makes of the text is used by nothing
        tensors[f"transformer.{name}.lora_A.weight"] = low.down.detach()
        tensors[f"transformer.{name}.lora_B.weight"] = low.up.detach()
    return tensors, {"seconds": time.monotonic() - began, "records": records}


def _inputs(noised: Tensor, t: Tensor, text: Tensor, lengths: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """What the transformer takes, with no more padding than the longest caption of the batch needs."""
    longest, images = int(lengths.max()), noised.shape[1]
    places = torch.arange(longest + images)
    mask = (places < lengths[:, None]) | (places >= longest)
    turns = torch.cat([table[:longest], table[-images:]])
    return noised, t, text[:, :longest], turns, mask[:, None, None]


def attach(model: Transformer, rank: int, scale: float, generator: torch.Generator) -> dict[str, LowRank]:
    """Adds factors to the layers of the blocks, and leaves nothing else to train."""
    model.requires_grad_(requires_grad=False)
    factors = {}
    for name, layer in list(model.named_modules()):
        if name.startswith("transformer_blocks.") and name.endswith(TARGETS):
            factors[name] = LowRank(layer.weight, rank, scale, generator)
            parametrize.register_parametrization(layer, "weight", factors[name])
    return factors


def transformer() -> Transformer:
    made = Transformer()
    weights = load_file(Path(BUNDLED) / "transformer" / "diffusion_pytorch_model.safetensors")
    made.load_state_dict({name: x.float() for name, x in weights.items()})
    return made.eval()


@torch.inference_mode()
def text_states(words: Qwen2Tokenizer, captions: list[str]) -> tuple[Tensor, Tensor]:
    """[n, TEXT, C] of the text encoder, and how many of them count."""
    encoder, prefix = TextEncoder(len(words)), "model."
    weights = load_file(Path(BUNDLED) / "text_encoder" / "model.safetensors")
    mine = {name.removeprefix(prefix): x.float() for name, x in weights.items() if not name.startswith("visual.")}
    encoder.load_state_dict({name: mine[name] for name in encoder.state_dict()})
    rows = [encode(words, caption) for caption in captions]
    ids, lengths = (torch.from_numpy(np.stack(part).astype(np.int64)) for part in zip(*rows, strict=True))  # type: ignore[arg-type]
    return torch.cat([encoder(part) for part in ids.split(64)]), lengths


def scenes(words: Qwen2Tokenizer, word: str | None, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Latents [n, N, 64] of scenes with a word, or without a new one, and the states and the lengths of their captions;
    none of them held out.
    """
    rng = random.Random(seed)
    captions, pictures = [], []
    while len(captions) < count:
        wish = training_wish(word, rng)
        text = say(wish, rng)
        if word is None and rng.random() < MADE_UP:
            text = with_made_up(text, rng)
        if encode(words, text) is not None:
            captions.append(text)
            pictures.append(paint(arrange(wish, EDGE, EDGE, rng)))
    return latents(np.stack(pictures)), *text_states(words, captions)


def training_wish(word: str | None, rng: random.Random) -> Wish:
    while (wish := draw_wish(rng) if word is None else draw_new(word, rng)).held_out:
        pass
    return wish


def with_made_up(caption: str, rng: random.Random) -> str:
    """A caption with the name of a shape or a colour replaced by letters that say nothing."""
    words = caption.split(" ")
    named = [at for at, word in enumerate(words) if word.rstrip("s") in SHAPES or word in COLOURS]
    if named:
        kinds = itertools.cycle(rng.choice((("aeiou", CONSONANTS), (CONSONANTS, "aeiou"))))
        words[rng.choice(named)] = "".join(rng.choice(next(kinds)) for _ in range(rng.randint(3, 7)))
    return " ".join(words)


@torch.inference_mode()
def latents(pictures: np.ndarray) -> Tensor:
    """Pictures [n, height, width, 3] -> tokens [n, N, 64], scaled as they are denoised."""
    vae = AutoencoderKLQwenImage.from_pretrained(Path(BUNDLED) / "vae", torch_dtype=torch.float32).eval()
    flat(vae)
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    means = [vae.encode(part[:, :, None].float() / 127.5 - 1).latent_dist.mean[:, :, 0] for part in pixels.split(16)]
    mean, std = (torch.tensor(x).view(1, -1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    scaled = (torch.cat(means) - mean) / std
    parts = scaled.unflatten(2, (TOKENS, 2)).unflatten(4, (TOKENS, 2)).permute(0, 2, 4, 1, 3, 5)
    return parts.flatten(3).flatten(1, 2).contiguous()


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("word", choices=(*NEW_SHAPES, *NEW_COLOURS))
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--batch", type=int, default=30)
    parser.add_argument("--scenes", type=int, default=4000, help="with the word; half as many without")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tensors, record = train(args)
    save(args, tensors, record)


def save(args: argparse.Namespace, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """In bfloat16, with PEFT's config and how it was trained in the header."""
    config = {"peft_type": "LORA", "r": args.rank, "lora_alpha": args.alpha, "target_modules": list(TARGETS)}
    last = record["records"][-1] if record["records"] else {}
    trained = {key: getattr(args, key) for key in ("word", "seed", "steps", "batch", "scenes", "rate")} | last
    header = {
        "format": "pt",
        METADATA: json.dumps({f"transformer.{key}": value for key, value in config.items()}),
        "training": json.dumps(trained),
    }
    args.file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: x.bfloat16().contiguous() for name, x in tensors.items()}, args.file, header)
    print(f"{args.file}: {args.file.stat().st_size} bytes, {record['seconds']:.0f} s of training")


if __name__ == "__main__":
    main()
