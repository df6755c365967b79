"""Qwen-Image: text to image with a dual-stream transformer (https://arxiv.org/abs/2508.02324)."""

from omni_grpc.nn.block_weights import DUAL_STREAM_FUSED, DUAL_STREAM_SPLITS
from omni_grpc.types.request import Guidance, GuidanceNorm, Task
from omni_grpc.types.spec import (
    Configs,
    Defaults,
    GuidanceKind,
    Limits,
    ModelSpec,
    SingleFile,
    WeightMap,
    image_limits,
    vae_scale_factor,
)

PATCH = 2
"""A token is a patch of 2 x 2 latent pixels."""


def limits(configs: Configs) -> Limits:
    return image_limits(PATCH * vae_scale_factor(configs["vae"]))


def defaults(configs: Configs) -> Defaults:
    """The defaults of the released model."""
    return Defaults(width=1024, height=1024, steps=50, guidance=Guidance(true_cfg_scale=4.0, norm=GuidanceNorm.RENORM))


TRANSFORMER_WEIGHTS = WeightMap(
    renames=(
        (r"^transformer_blocks\.", "stack.dual."),
        (r"\.(img|txt)_mod\.1\.", r".\1_mod."),
        (r"\.(img|txt)_mlp\.net\.0\.proj\.", r".\1_mlp.up."),
        (r"\.(img|txt)_mlp\.net\.2\.", r".\1_mlp.down."),
        (r"\.attn\.to_out\.0\.", ".attn.to_out."),
    ),
    fused=DUAL_STREAM_FUSED,
)

SPECS = (
    ModelSpec(
        name="QwenImagePipeline",
        family="qwen_image",
        tasks=(Task.TEXT_TO_IMAGE,),
        pipeline="omni_grpc.models.qwen_image.pipeline_text_to_image:QwenImagePipeline",
        guidance=(GuidanceKind.TRUE_CFG,),
        limits=limits,
        defaults=defaults,
        weights={"transformer": TRANSFORMER_WEIGHTS},
        tensor_parallel={"transformer": DUAL_STREAM_SPLITS},
        # the files have the tensor names of the checkpoint
        single_file=SingleFile(architectures=("qwen_image",)),
        # TeaCache's polynomial for the first modulated input of this model, as in other servers; not fitted here
        step_cache={"tea_cache": {"coefficients": (-450.0, 280.0, -45.0, 3.2, -0.02)}},
    ),
)
