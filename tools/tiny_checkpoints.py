"""Builds tiny checkpoints with random weights, in the exact layout of the real ones: what tests and the demo run on.

    python tools/tiny_checkpoints.py qwen_image OUT [--seed 0] [--heads 4 --head-dim 32 --layers 2]

Nothing is downloaded: every component is made from a config, and the tokenizer is trained on the few sentences below.
The same arguments give the same files, in any process.
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from diffusers import QwenImageTransformer2DModel as QwenImageTransformer
from tokenizers import Regex, pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

QWEN_IMAGE_PREFIX = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:\nuser\n"
)
SENTENCES = (
    QWEN_IMAGE_PREFIX,
    "assistant\nPicture 1: a photo of a red cat sitting on a wooden table, studio light, high detail",
    "a blue robot walking through a rainy city street at night, cinematic, 4k",
    "the quick brown fox jumps over the lazy dog while a small bird sings in the green forest",
    "low quality, blurry, distorted, worst quality, jpeg artifacts, extra fingers, static",
    "mountains and a lake at sunrise, watercolor painting, soft pastel colors",
)
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def build_qwen_image(folder: Path, *, seed: int = 0, heads: int = 4, head_dim: int = 32, layers: int = 2) -> Path:
    """A Qwen-Image of about 1.7 million parameters; the arguments shape the transformer alone."""
    time_axis = max(2, head_dim // 8 // 2 * 2)
    tokenizer = _qwen_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = QwenImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                base_image_seq_len=256,
                base_shift=0.5,
                max_image_seq_len=8192,
                max_shift=0.9,
                shift_terminal=0.02,
                use_dynamic_shifting=True,
            ),
            vae=AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1),
            text_encoder=_qwen_text_encoder(tokenizer),
            tokenizer=tokenizer,
            transformer=QwenImageTransformer(
                num_layers=layers,
                attention_head_dim=head_dim,
                num_attention_heads=heads,
                joint_attention_dim=64,
                axes_dims_rope=(time_axis, (head_dim - time_axis) // 2, (head_dim - time_axis) // 2),
            ),
        )
        _disturb_norms(pipeline.transformer)
    pipeline.save_pretrained(folder)
    return folder


def _disturb_norms(module: torch.nn.Module) -> None:
    """Norm weights start as ones, all alike: a model that mixed two of them up would not be found out."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)


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


def _qwen_tokenizer() -> Qwen2Tokenizer:
    split = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = Counter(
        tuple(word)
        for sentence in SENTENCES
        for word, _ in pre_tokenizers.Sequence([split, to_bytes]).pre_tokenize_str(sentence)
    )
    vocab, merges = _train_bpe(words, sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocab |= {token: len(vocab) + place for place, token in enumerate(QWEN_SPECIAL)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN_SPECIAL[1:])})
    tokenizer.padding_side = "right"
    return tokenizer


def _train_bpe(words: Counter[tuple[str, ...]], alphabet: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-pair encoding until every word is one token: the vocabulary and the merges in order.

    Ties go to the first pair in the alphabet. The trainers of `tokenizers` break them by hash, so that their ids differ
    from process to process.
    """
    vocab = {symbol: place for place, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    while pairs := _count_pairs(words):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        vocab.setdefault("".join(best), len(vocab))
        merged: Counter[tuple[str, ...]] = Counter()
        for word, count in words.items():
            merged[_merge(word, best)] += count
        words = merged
    return vocab, merges


def _count_pairs(words: Counter[tuple[str, ...]]) -> Counter[tuple[str, str]]:
    pairs: Counter[tuple[str, str]] = Counter()
    for word, count in words.items():
        for pair in pairwise(word):
            pairs[pair] += count
    return pairs


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        # a symbol that was itself merged just now has another spelling, so it cannot be taken for the first half again
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


BUILDERS = {"qwen_image": build_qwen_image}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(BUILDERS))
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heads", type=int, default=4, help="attention heads of the transformer")
    parser.add_argument("--head-dim", type=int, default=32, help="128 where real GPU kernels are to run")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the transformer")
    args = parser.parse_args()
    print(BUILDERS[args.family](args.out, seed=args.seed, heads=args.heads, head_dim=args.head_dim, layers=args.layers))


if __name__ == "__main__":
    main()
