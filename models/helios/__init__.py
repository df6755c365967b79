"""Helios: long videos, chunk by chunk, by a transformer with the blocks of Wan."""

from collections.abc import Mapping
from typing import Any

from omni_grpc.nn.block_weights import CROSS_DIT_SPLITS, CROSS_DIT_WEIGHTS
from omni_grpc.types.request import Guidance, Task
from omni_grpc.types.spec import (
    Configs,
    Defaults,
    GuidanceKind,
    Limits,
    ModelSpec,
    Split,
    SplitKind,
    WeightMap,
    check_config,
)

PATCH = 2
"""A token is a patch of 2 x 2 latent pixels of one latent frame."""

CHUNK = 9
"""Latent frames of a chunk."""

LONG, MID, SHORT = "long", "mid", "short"
HISTORY: Mapping[str, int] = {LONG: 16, MID: 2, SHORT: 1}
"""The history of a chunk: latent frames before it, oldest first; older frames are coarser. The first frame of the video
is always added to the last ones.
"""

TEXT_TOKENS = 512
"""Length of every prompt: shorter ones are padded with zeros, which are attended."""

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
    """Frames of a chunk. A chunk is decoded by itself, so its first latent frame is one frame."""
    frames: int = (CHUNK - 1) * configs["vae"].get("scale_factor_temporal", 4) + 1
    return frames


def limits(configs: Configs) -> Limits:
    """Sizes follow from the VAE. The most pixels and frames (four times the default size, a minute at 24 frames per
    second) are a choice, not a limit of the model.
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
    """The defaults of the released model."""
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
        *CROSS_DIT_WEIGHTS.renames,
        (r"^norm_out\.", ""),
        (r"\.history_key_scale$", ".history_key_scale.weight"),
    ),
    fused=CROSS_DIT_WEIGHTS.fused,
    float32=(*CROSS_DIT_WEIGHTS.float32, r"\.history_key_scale\."),
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
        tensor_parallel={
            "transformer": {**CROSS_DIT_SPLITS, "*.attn1.history_key_scale": Split(SplitKind.PER_HEAD, optional=True)}
        },
        takes=frozenset({"num_frames", "first_frame", "source_video"}),
    ),
)
