"""Helios: long videos, made chunk by chunk by a transformer that has the blocks of Wan."""

from collections.abc import Mapping
from typing import Any

from omni_grpc.types.request import Guidance, Task
from omni_grpc.types.spec import Configs, Defaults, GuidanceKind, Limits, ModelSpec, WeightMap, check_config

PATCH = 2
"""A token is 2 x 2 latents of one latent frame."""

CHUNK = 9
"""Latent frames of a chunk."""

LONG, MID, SHORT = "long", "mid", "short"
HISTORY: Mapping[str, int] = {LONG: 16, MID: 2, SHORT: 1}
"""Latent frames before a chunk that it goes by, in their order: the older, the coarser. The first frame of the video is
always added to the last ones.
"""

TEXT_TOKENS = 512
"""Length that every text is brought to: shorter ones get zeros, which are attended."""

SERVED: Mapping[str, Any] = {
    "patch_size": [1, PATCH, PATCH],
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "added_kv_proj_dim": None,
    "guidance_cross_attn": True,
    "zero_history_timestep": True,
    "has_multi_term_memory_patch": True,
}
"""Settings of the transformer, and the values that are served."""


def variant(configs: Configs) -> Mapping[str, Any]:
    """Raises CheckpointError for settings that are not served yet."""
    check_config(configs["transformer"], SERVED)
    return {}


def chunk_frames(configs: Configs) -> int:
    """Frames of a chunk. Each is decoded by itself, and a first latent frame is one frame."""
    frames: int = (CHUNK - 1) * configs["vae"].get("scale_factor_temporal", 4) + 1
    return frames


def limits(configs: Configs) -> Limits:
    """Sizes follow from the VAE. The most pixels and frames are a choice, not a limit of the model: four times the
    default size, and a minute at 24 frames per second.
    """
    multiple, chunk = PATCH * configs["vae"].get("scale_factor_spatial", 8), chunk_frames(configs)
    return Limits(
        size_multiple=multiple,
        min_size=multiple,
        max_size=2048,
        max_pixels=1280 * 768,
        max_prompt_tokens=TEXT_TOKENS,
        max_frames=44 * chunk,
        frame_multiple=chunk,
        segment_frames=chunk,
    )


def defaults(configs: Configs) -> Defaults:
    """Those of the released model, whatever the size of the checkpoint."""
    return Defaults(
        width=640,
        height=384,
        steps=50,
        guidance=Guidance(true_cfg_scale=5.0),
        negative_prompt="",
        num_frames=4 * chunk_frames(configs),
        fps=24.0,
    )


TRANSFORMER_WEIGHTS = WeightMap(
    renames=(
        (r"^blocks\.", "stack.blocks."),
        (r"^norm_out\.", ""),
        (r"\.ffn\.net\.0\.proj\.", ".ffn.up."),
        (r"\.ffn\.net\.2\.", ".ffn.down."),
        (r"\.to_out\.0\.", ".to_out."),
    ),
    fused={"attn1.to_qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"), "attn2.to_kv": ("attn2.to_k", "attn2.to_v")},
    float32=(r"(^|\.)scale_shift_table$", r"\.norm2\.", r"\.time_embedder\.", r"\.history_key_scale$"),
)

SPECS = (
    ModelSpec(
        name="HeliosPipeline",
        family="helios",
        tasks=(Task.TEXT_TO_VIDEO, Task.IMAGE_TO_VIDEO, Task.VIDEO_TO_VIDEO),
        pipeline="omni_grpc.models.helios.pipeline_video:HeliosPipeline",
        guidance=(GuidanceKind.TRUE_CFG,),
        limits=limits,
        defaults=defaults,
        variant=variant,
        weights={"transformer": TRANSFORMER_WEIGHTS},
        takes=frozenset({"num_frames", "first_frame", "source_video"}),
    ),
)
