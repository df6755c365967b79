"""Tokenizers that are trained on a few sentences, and text encoders to go with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GemmaTokenizer,
    PreTrainedModel,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

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
QWEN_CHAT = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
"""One turn in the form that Qwen models know; system prompts, pictures and tools are left out."""

CLIP_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
UNDERLINE = "\N{LOWER ONE EIGHTH BLOCK}"


def qwen_tokenizer(sentences: Sequence[str] = SENTENCES) -> Qwen2Tokenizer:
    split = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = _words(pre_tokenizers.Sequence([split, to_bytes]), tuple, sentences)
    vocab, merges = train_bpe(words, sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocab |= {token: len(vocab) + place for place, token in enumerate(QWEN_SPECIAL)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN_SPECIAL[1:])})
    tokenizer.padding_side = "right"
    return tokenizer


def clip_tokenizer() -> CLIPTokenizer:
    split = pre_tokenizers.Split(Regex(CLIP_WORDS), "removed", invert=True)
    words = _words(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        lambda word: (*word[:-1], word[-1] + "</w>"),
        [sentence.lower() for sentence in SENTENCES],
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = train_bpe(words, alphabet + [symbol + "</w>" for symbol in alphabet])
    # the end of the text has the highest id, by which CLIP finds it
    vocab |= {"<|startoftext|>": len(vocab), "<|endoftext|>": len(vocab) + 1}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def t5_tokenizer(length: int = 512, *, sentinels: int = 10) -> T5Tokenizer:
    """Whole words of the sentences, then single characters, with the ids that T5 wants: pad 0, end 1, unknown 2."""
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(UNDERLINE, prepend_scheme="always", split=True)]
    )
    counts = Counter(piece for sentence in SENTENCES for piece, _ in split.pre_tokenize_str(sentence))
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [
        (word, round(math.log(count / counts.total()), 6))
        for word, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    pieces += [(symbol, -14.0) for symbol in (UNDERLINE, *map(chr, range(33, 127))) if symbol not in counts]
    pieces += [(f"<extra_id_{place}>", 0.0) for place in reversed(range(sentinels))]
    return T5Tokenizer(vocab=pieces, extra_ids=sentinels, model_max_length=length)


def gemma_tokenizer(length: int = 1024) -> GemmaTokenizer:
    """Whole words of the sentences, and bytes for all else."""
    words = _words(
        pre_tokenizers.Split(" ", "merged_with_previous"), lambda word: tuple(word.replace(" ", UNDERLINE)), SENTENCES
    )
    alphabet = sorted({symbol for word in words for symbol in word})
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    vocab, merges = train_bpe(words, [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet])
    return GemmaTokenizer(vocab=vocab, merges=merges, model_max_length=length)


def clip_encoder(tokenizer: CLIPTokenizer, *, hidden: int = 32, projection: int | None = None) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=projection or hidden,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)


def t5_encoder(tokenizer: T5Tokenizer, *, width: int = 64, multilingual: bool = False) -> T5EncoderModel:
    config = (UMT5Config if multilingual else T5Config)(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=32,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return (UMT5EncoderModel if multilingual else T5EncoderModel)(config)


def qwen3_encoder(
    tokenizer: Qwen2Tokenizer, *, layers: int = 3, kind: type[PreTrainedModel] = Qwen3Model
) -> PreTrainedModel:
    return kind(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
    )


def gemma_encoder(tokenizer: GemmaTokenizer, *, width: int = 32) -> Gemma3ForConditionalGeneration:
    """It can see, too, but nobody shows it anything."""
    config = Gemma3Config(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
        },
        mm_tokens_per_image=4,
        boi_token_index=len(tokenizer) - 3,
        eoi_token_index=len(tokenizer) - 2,
        image_token_index=len(tokenizer) - 1,
    )
    return Gemma3ForConditionalGeneration(config)


def train_bpe(words: Counter[tuple[str, ...]], alphabet: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
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


def _words(split: Any, symbols: Callable[[str], tuple[str, ...]], sentences: Sequence[str]) -> Counter[tuple[str, ...]]:
    return Counter(symbols(word) for sentence in sentences for word, _ in split.pre_tokenize_str(sentence))


def _count_pairs(words: Mapping[tuple[str, ...], int]) -> Counter[tuple[str, str]]:
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
