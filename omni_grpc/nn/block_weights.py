"""Data for specs about the weights of blocks that several families share: how diffusers' names become those of our
modules, what is fused, and what tensor parallelism shards. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from omni_grpc.types.spec import Split, SplitKind, WeightMap

DUAL_STREAM_FUSED: Mapping[str, tuple[str, ...]] = {
    "attn.to_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attn.add_qkv_proj": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
"""WeightMap.fused of dual_stream.DualStreamBlock."""

DUAL_STREAM_SPLITS: Mapping[str, Split] = {
    "*.attn.to_qkv": Split(SplitKind.COLUMN),
    "*.attn.add_qkv_proj": Split(SplitKind.COLUMN),
    "*.attn.attention": Split(SplitKind.HEADS),
    "*.attn.to_out": Split(SplitKind.ROW),
    "*.attn.to_add_out": Split(SplitKind.ROW),
    "*_mlp.up": Split(SplitKind.COLUMN),
    "*_mlp.down": Split(SplitKind.ROW),
}
"""How dual_stream.DualStreamBlock is sharded."""

CROSS_DIT_WEIGHTS = WeightMap(
    renames=(
        (r"^blocks\.", "stack.blocks."),
        (r"\.ffn\.net\.0\.proj\.", ".ffn.up."),
        (r"\.ffn\.net\.2\.", ".ffn.down."),
        (r"\.to_out\.0\.", ".to_out."),
    ),
    fused={"attn1.to_qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"), "attn2.to_kv": ("attn2.to_k", "attn2.to_v")},
    float32=(r"(^|\.)scale_shift_table$", r"\.norm2\.", r"\.time_embedder\."),
)
"""Transformers of cross_dit.CrossDiTBlock in a stack."""

CROSS_DIT_SPLITS: Mapping[str, Split] = {
    "*.attn1.to_qkv": Split(SplitKind.COLUMN),
    "*.attn2.to_q": Split(SplitKind.COLUMN),
    "*.attn2.to_kv": Split(SplitKind.COLUMN),
    "*.attn?.norm_?": Split(SplitKind.NORM),
    "*.attn?.attention": Split(SplitKind.HEADS),
    "*.attn?.to_out": Split(SplitKind.ROW),
    "*.ffn.up": Split(SplitKind.COLUMN),
    "*.ffn.down": Split(SplitKind.ROW),
}
"""How cross_dit.CrossDiTBlock is sharded."""
