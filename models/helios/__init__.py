"""Helios: long videos, chunk by chunk, on the block of Wan (https://arxiv.org/abs/2503.20314)."""

import dataclasses

from omni_grpc.models.wan import TEXT_TOKENS
from omni_grpc.models.wan import TRANSFORMER_WEIGHTS as WAN_WEIGHTS
from omni_grpc.request import Guidance, Task
from omni_grpc.spec import Configs, Defaults, GuidanceKind, Limits, ModelSpec

PATCH = 2
"""A token is 2 x 2 latents of one latent frame."""

CHUNK = 9
"""Latent frames of a chunk."""

LONG, MID, SHORT = "long", "mid", "short"
HISTORY = {LONG: 16, MID: 2, SHORT: 1}
"""Latent frames before a chunk that it goes by, in their order: the older, the coarser. The first frame of the video is
always added to the last ones.
"""


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
        num_frames=4 * chunk_frames(configs),
        fps=24.0,
    )


TRANSFORMER_WEIGHTS = dataclasses.replace(
    WAN_WEIGHTS,
    renames=(*WAN_WEIGHTS.renames, (r"^norm_out\.", "")),
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
        weights={"transformer": TRANSFORMER_WEIGHTS},
        takes=frozenset({"num_frames", "fps", "first_frame", "source_video"}),
    ),
)
