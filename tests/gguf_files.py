"""GGUF files made of tiny checkpoints, under the checkpoint's names or those of the model's first publication."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from omni_grpc.loading.checkpoint import WEIGHT_FILE

KINDS = ("Q4_K", "Q8_0", "Q5_K", "F16", "Q6_K", "Q4_0", "BF16", "Q5_0", "Q4_1", "Q5_1", "Q4_K")
"""In this order, tensor by tensor, so that a fused layer has unlike parts."""

Pieces = dict[str, list[tuple[str, int | None]]]
"""A name in the file -> what it is made of: names of the checkpoint, whole (None) or one of two halves."""


def checkpoint_names(names: Iterable[str]) -> Pieces:
    return {name: [(name, None)] for name in names}


FLUX = (
    (r"^time_text_embed\.timestep_embedder\.", "time_in."),
    (r"^time_text_embed\.text_embedder\.", "vector_in."),
    (r"^time_text_embed\.guidance_embedder\.", "guidance_in."),
    (r"\.linear_1\.", ".in_layer."),
    (r"\.linear_2\.", ".out_layer."),
    (r"^x_embedder\.", "img_in."),
    (r"^context_embedder\.", "txt_in."),
    (r"^proj_out\.", "final_layer.linear."),
    (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
    (r"^(transformer_blocks\.\d+)\.attn\.to_[qkv]\.", r"\1.img_attn.qkv."),
    (r"^(transformer_blocks\.\d+)\.attn\.add_[qkv]_proj\.", r"\1.txt_attn.qkv."),
    (r"^(single_transformer_blocks\.\d+)\.(attn\.to_[qkv]|proj_mlp)\.", r"\1.linear1."),
    (r"^(single_transformer_blocks\.\d+)\.proj_out\.", r"\1.linear2."),
    (r"^(single_transformer_blocks\.\d+)\.norm\.linear\.", r"\1.modulation.lin."),
    (r"^(single_transformer_blocks\.\d+)\.attn\.norm_q\.weight$", r"\1.norm.query_norm.scale"),
    (r"^(single_transformer_blocks\.\d+)\.attn\.norm_k\.weight$", r"\1.norm.key_norm.scale"),
    (r"\.attn\.norm_q\.weight$", ".img_attn.norm.query_norm.scale"),
    (r"\.attn\.norm_k\.weight$", ".img_attn.norm.key_norm.scale"),
    (r"\.attn\.norm_added_q\.weight$", ".txt_attn.norm.query_norm.scale"),
    (r"\.attn\.norm_added_k\.weight$", ".txt_attn.norm.key_norm.scale"),
    (r"\.attn\.to_out\.0\.", ".img_attn.proj."),
    (r"\.attn\.to_add_out\.", ".txt_attn.proj."),
    (r"\.norm1\.linear\.", ".img_mod.lin."),
    (r"\.norm1_context\.linear\.", ".txt_mod.lin."),
    (r"\.ff\.net\.0\.proj\.", ".img_mlp.0."),
    (r"\.ff\.net\.2\.", ".img_mlp.2."),
    (r"\.ff_context\.net\.0\.proj\.", ".txt_mlp.0."),
    (r"\.ff_context\.net\.2\.", ".txt_mlp.2."),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"^single_transformer_blocks\.", "single_blocks."),
)
WAN = (
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^proj_out\.", "head.head."),
    (r"^scale_shift_table$", "head.modulation"),
    (r"\.scale_shift_table$", ".modulation"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_(q|k|v)\.", r".\1."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
    (r"\.norm2\.", ".norm3."),
)
Z_IMAGE = (
    (r"^all_x_embedder\.2-1\.", "x_embedder."),
    (r"^all_final_layer\.2-1\.", "final_layer."),
    (r"\.attention\.to_out\.0\.", ".attention.out."),
    (r"\.attention\.norm_(q|k)\.", r".attention.\1_norm."),
    (r"\.attention\.to_[qkv]\.", ".attention.qkv."),
)
PARTS = ("q.", "k.", "v.", "q_proj.", "k_proj.", "v_proj.", "mlp.")
"""The ends of the modules that are one in a file, in their order there."""


def original_names(table: Iterable[tuple[str, str]]) -> Callable[[Iterable[str]], Pieces]:
    """The names of a model's first publication, by what replaces what in those of the checkpoint."""

    def named(names: Iterable[str]) -> Pieces:
        pieces: Pieces = {}
        for name in names:
            new = name
            for pattern, replacement in table:
                new = re.sub(pattern, replacement, new)
            pieces.setdefault(new, []).append((name, None))
        for new, parts in pieces.items():
            if "final_layer.adaLN_modulation.1." in new and parts[0][0].startswith("norm_out"):
                # shift, then scale there; scale, then shift in diffusers
                parts[:] = [(parts[0][0], 1), (parts[0][0], 0)]
            elif len(parts) > 1:
                parts.sort(key=lambda part: [part[0].rpartition(".")[0].endswith(end[:-1]) for end in PARTS][::-1])
        return pieces

    return named


def joined(weights: Mapping[str, Tensor], pieces: Pieces) -> dict[str, Tensor]:
    """The tensors of a file."""
    return {
        new: torch.cat([weights[name] if half is None else weights[name].chunk(2)[half] for name, half in parts])
        for new, parts in pieces.items()
    }


def parted(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor], pieces: Pieces) -> dict[str, Tensor]:
    """The checkpoint's weights with the numbers of a file's tensors."""
    made = {name: torch.empty(weight.shape) for name, weight in weights.items()}
    for new, parts in pieces.items():
        views = [made[name] if half is None else made[name].chunk(2)[half] for name, half in parts]
        for view, rows in zip(views, tensors[new].split([len(view) for view in views]), strict=True):
            view.copy_(rows.reshape(view.shape))
    return made


def packed(tensor: Tensor, kind: str, seed: int = 0) -> np.ndarray:
    """What a file has of a tensor. The package packs no K-quants, so their blocks are random, of about its size."""
    values = tensor.float().numpy()
    if not kind.endswith("_K"):
        made: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        return made
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (values.size // elements, size), dtype=np.uint8)
    # the largest code times the largest scale is four times a typical weight
    largest = {"Q4_K": 15 * 63, "Q5_K": 31 * 63, "Q6_K": 32 * 128}[kind]
    for at, scale in [(208, 4 / largest)] if kind == "Q6_K" else [(0, 4 / largest), (2, 2 / 63)]:
        scales = values.std() * scale * generator.uniform(0.5, 1, len(blocks))
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*values.shape[:-1], -1)


def kind_of(tensor: Tensor, number: int, among: Sequence[str] = KINDS) -> str:
    if tensor.dim() != 2:
        return "F32"
    for kind in (*among[number % len(among) :], *among):
        if tensor.shape[1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 0:
            return kind
    return "F32"


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    architecture: str | None,
    *,
    kinds: Mapping[str, str] | None = None,
    among: Sequence[str] = KINDS,
    prefix: str = "",
) -> dict[str, Tensor]:
    """A GGUF file of tensors, and the numbers that gguf finds in it. `kinds` are types by name, F32 where it is silent;
    without it, each matrix has another one `among` these.
    """
    writer = gguf.GGUFWriter(path, architecture or "")
    if architecture is None:
        writer.kv_data[0].pop(gguf.Keys.General.ARCHITECTURE, None)
    numbers = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        kind = kind_of(tensor, number, among) if kinds is None else kinds.get(name, "F32")
        data = packed(tensor, kind, number)
        writer.add_tensor(prefix + name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        numbers[name] = torch.from_numpy(
            np.array(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])).reshape(tensor.shape)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def convert(
    folder: Path,
    path: Path,
    architecture: str | None,
    names: Callable[[Iterable[str]], Pieces] = checkpoint_names,
    *,
    component: str = "transformer",
    **more: Any,
) -> Path:
    """Writes the GGUF file of a checkpoint's denoiser, and returns a copy of the checkpoint with its numbers."""
    weights = safetensors.torch.load_file(folder / component / WEIGHT_FILE)
    pieces = names(weights)
    numbers = write(path, joined(weights, pieces), architecture, **more)
    copy = path.parent / f"{path.stem}-numbers"
    if not copy.exists():
        shutil.copytree(folder, copy)
    made = {name: weight.contiguous() for name, weight in parted(numbers, weights, pieces).items()}
    safetensors.torch.save_file(made, copy / component / WEIGHT_FILE)
    return copy
