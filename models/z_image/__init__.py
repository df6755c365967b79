"""Z-Image and Z-Image-Turbo: text to image with a single-stream transformer (https://arxiv.org/abs/2511.22699)."""

from collections.abc import Mapping

from omni_grpc.types.request import Guidance, Task
from omni_grpc.types.spec import (
    Configs,
    Defaults,
    FileLayout,
    GuidanceKind,
    Limits,
    ModelSpec,
    RowSlice,
    SingleFile,
    Split,
    SplitKind,
    WeightMap,
    image_limits,
    vae_scale_factor,
)

PATCH = 2
"""A token is a patch of 2 x 2 latent pixels."""

TURBO_SHIFT = 3.0
"""The shift in the scheduler's config of the released Turbo; the base model has 6. Nothing else in a checkpoint tells
them apart."""


def limits(configs: Configs) -> Limits:
    """The longest edge is as many tokens as the RoPE axes of the checkpoint have positions. The authors recommend at
    most 2048 x 2048 pixels.
    """
    multiple = PATCH * vae_scale_factor(configs["vae"])
    return image_limits(multiple, max_size=min(4096, multiple * min(configs["transformer"]["axes_lens"][1:])))


def defaults(configs: Configs) -> Defaults:
    """The defaults of the two released models: the distilled one takes few steps, without guidance."""
    turbo = configs["scheduler"].get("shift") == TURBO_SHIFT
    guidance = Guidance(true_cfg_scale=0.0 if turbo else 5.0)
    return Defaults(width=1024, height=1024, steps=8 if turbo else 50, guidance=guidance, negative_prompt="")


TRANSFORMER_WEIGHTS = WeightMap(
    renames=(
        (r"^noise_refiner\.", "noise_refiner.noise."),
        (r"^context_refiner\.", "context_refiner.context."),
        (r"^layers\.", "stack.single."),
        (r"^t_embedder\.mlp\.", "t_embedder."),
        (r"^all_x_embedder\.2-1\.", "x_embedder."),
        (r"^all_final_layer\.2-1\.", "final_layer."),
        (r"\.adaLN_modulation\.[01]\.", ".adaLN_modulation."),
        (r"\.attention\.to_out\.0\.", ".attention.to_out."),
    ),
    fused={"attention.to_qkv": ("attention.to_q", "attention.to_k", "attention.to_v")},
)

TRANSFORMER_SPLITS: Mapping[str, Split] = {
    "*.attention.to_qkv": Split(SplitKind.COLUMN),
    "*.attention.attention": Split(SplitKind.HEADS),
    "*.attention.to_out": Split(SplitKind.ROW),
    "*.feed_forward.w1": Split(SplitKind.COLUMN),
    "*.feed_forward.w3": Split(SplitKind.COLUMN),
    "*.feed_forward.w2": Split(SplitKind.ROW),
}

SINGLE_FILE = SingleFile(
    # GGUF files name the architecture that Z-Image derives from
    architectures=("lumina2", "z_image"),
    layouts=(
        # the names of https://github.com/Tongyi-MAI/Z-Image
        FileLayout(
            mark="layers.0.attention.qkv.weight",
            renames=(
                (r"^x_embedder\.", "all_x_embedder.2-1."),
                (r"^final_layer\.", "all_final_layer.2-1."),
                (r"\.attention\.out\.", ".attention.to_out.0."),
                (r"\.attention\.(q|k)_norm\.", r".attention.norm_\1."),
            ),
            cuts={
                "attention.qkv": (RowSlice("attention.to_q"), RowSlice("attention.to_k"), RowSlice("attention.to_v"))
            },
            unused=(r"^norm_final\.",),
        ),
    ),
)

SPECS = (
    ModelSpec(
        name="ZImagePipeline",
        family="z_image",
        tasks=(Task.TEXT_TO_IMAGE,),
        pipeline="omni_grpc.models.z_image.pipeline_text_to_image:ZImagePipeline",
        guidance=(GuidanceKind.TRUE_CFG,),
        limits=limits,
        defaults=defaults,
        weights={"transformer": TRANSFORMER_WEIGHTS},
        tensor_parallel={"transformer": TRANSFORMER_SPLITS},
        single_file=SINGLE_FILE,
    ),
)
