"""Qwen-Image: text to image, a dual-stream transformer (https://arxiv.org/abs/2508.02324)."""

from collections.abc import Mapping

from omni_grpc.types.request import Guidance, GuidanceNorm, Task
from omni_grpc.types.spec import (
    Configs,
    Defaults,
    GuidanceKind,
    Limits,
    ModelSpec,
    SingleFile,
    Split,
    SplitKind,
    WeightMap,
    image_limits,
    vae_scale_factor,
)

PATCH = 2
"""Latents are packed in patches of 2 x 2 into one token."""


def limits(configs: Configs) -> Limits:
    return image_limits(PATCH * vae_scale_factor(configs["vae"]))


def defaults(configs: Configs) -> Defaults:
    """Those of the released model, whatever the size of the checkpoint."""
    return Defaults(width=1024, height=1024, steps=50, guidance=Guidance(true_cfg_scale=4.0, norm=GuidanceNorm.RENORM))


TRANSFORMER_WEIGHTS = WeightMap(
    renames=(
        (r"^transformer_blocks\.", "stack.dual."),
        (r"\.(img|txt)_mod\.1\.", r".\1_mod."),
        (r"\.(img|txt)_mlp\.net\.0\.proj\.", r".\1_mlp.up."),
        (r"\.(img|txt)_mlp\.net\.2\.", r".\1_mlp.down."),
        (r"\.attn\.to_out\.0\.", ".attn.to_out."),
    ),
    fused={
        "attn.to_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "attn.add_qkv_proj": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    },
)

TRANSFORMER_SPLITS: Mapping[str, Split] = {
    "*.attn.to_qkv": Split(SplitKind.COLUMN),
    "*.attn.add_qkv_proj": Split(SplitKind.COLUMN),
    "*.attn.attention": Split(SplitKind.HEADS),
    "*.attn.to_out": Split(SplitKind.ROW),
    "*.attn.to_add_out": Split(SplitKind.ROW),
    "*_mlp.up": Split(SplitKind.COLUMN),
    "*_mlp.down": Split(SplitKind.ROW),
}

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
        tensor_parallel={"transformer": TRANSFORMER_SPLITS},
        # they have the checkpoint's own names
        single_file=SingleFile(architectures=("qwen_image",)),
        # TeaCache's polynomial for this model's first modulated input, as other servers have it; not fitted here
        cache_coefficients=(-450.0, 280.0, -45.0, 3.2, -0.02),
    ),
)
