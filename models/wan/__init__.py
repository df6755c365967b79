"""Wan: text to video and image to video, one transformer or two experts (https://arxiv.org/abs/2503.20314)."""

from collections.abc import Mapping
from typing import Any

from omni_grpc.nn.block_weights import CROSS_DIT_SPLITS, CROSS_DIT_WEIGHTS
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.request import Guidance, Task
from omni_grpc.types.spec import (
    Configs,
    Defaults,
    FileLayout,
    GuidanceKind,
    Limits,
    ModelSpec,
    SingleFile,
    check_config,
    vae_scale_factor,
)

SCHEDULERS = ("FlowMatchEulerDiscreteScheduler",)
"""What distilled adapters of the family are made for; the checkpoints have UniPC."""
TEXT_TOKENS = 512
"""Length of every prompt: shorter ones are padded with zeros, which are attended."""

SERVED: Mapping[str, Any] = {
    "added_kv_proj_dim": None,
    "image_dim": None,
    "pos_embed_seq_len": None,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
}
"""Settings of the transformer that other members of the family change, and the values that are served."""


PUBLISHED: Mapping[int, tuple[float, ...]] = {
    30: (-52186.2437, 9230.41404, -528.275948, 13.6987616, -0.0499875664),
    40: (-303318.725, 49053.7029, -2655.30556, 58.7365115, -0.315583525),
}
"""What TeaCache was fitted to for Wan2.1's text to video, 1.3B and 14B, by their number of blocks: from the change of
the modulation that the timestep gives (https://github.com/ali-vilab/TeaCache, TeaCache4Wan2.1, with `use_ret_steps`).
"""


def variant(configs: Configs) -> Mapping[str, Any]:
    """A checkpoint whose tokens have timesteps of their own (TI2V) does both tasks.

    Raises CheckpointError for a member of the family that is not served yet.
    """
    if absent := {"transformer", "vae", "scheduler"} - configs.keys():
        raise CheckpointError(f"model_index.json names no {' and no '.join(sorted(absent))}")
    check_config(configs["transformer"], SERVED)
    if configs[""].get("boundary_ratio") is not None and "transformer_2" not in configs:
        raise CheckpointError("model_index.json has a boundary_ratio and no transformer_2, the expert after it")
    shift = "flow_shift" if "flow_shift" in configs["scheduler"] else "shift"
    changed: dict[str, Any] = {
        "settings": {"boundary_ratio": ("", "boundary_ratio"), "flow_shift": ("scheduler", shift)}
    }
    if configs[""].get("expand_timesteps"):
        changed["tasks"] = (Task.TEXT_TO_VIDEO, Task.IMAGE_TO_VIDEO)
        changed["takes"] = frozenset({"num_frames", "first_frame"})
        changed["pipeline"] = "omni_grpc.models.wan.pipeline_text_image_to_video:WanTextImageToVideoPipeline"
    elif "transformer_2" not in configs and (fitted := PUBLISHED.get(configs["transformer"].get("num_layers", 0))):
        changed["step_cache"] = {"tea_cache": {"signal": "timestep", "coefficients": fitted, "rel_l1_thresh": 0.1}}
    return changed


def pixels_per_token(configs: Configs) -> int:
    """Along an edge: the patches of the transformer, times the downscaling of the VAE with its own patches."""
    vae = configs["vae"]
    return int(configs["transformer"]["patch_size"][1] * (vae.get("patch_size") or 1) * vae_scale_factor(vae))


def frames_per_latent(configs: Configs) -> int:
    """Frames per latent frame, after the first frame, which has a latent frame of its own."""
    return int(2 ** sum(configs["vae"]["temperal_downsample"]))


def limits(configs: Configs) -> Limits:
    """Sizes and numbers of frames follow from the VAE and the patches.

    The most pixels and frames (1920 x 1088 and 257) are a choice, not a limit of the model.
    """
    multiple = pixels_per_token(configs)
    return Limits(
        size_multiple=multiple,
        min_size=multiple,
        max_size=2048,
        max_pixels=1920 * 1088,
        max_prompt_tokens=TEXT_TOKENS,
        max_frames=257,
        frame_multiple=frames_per_latent(configs),
        frame_offset=1,
    )


def defaults(configs: Configs) -> Defaults:
    """The defaults of the released models: TI2V, image to video and text to video with two experts, and with one."""
    index = configs[""]
    boundary = index.get("boundary_ratio")
    if index.get("expand_timesteps"):
        guidance = Guidance(true_cfg_scale=5.0)
        return _defaults(1280, 704, num_frames=121, fps=24.0, steps=50, guidance=guidance)
    if boundary is None:
        guidance, steps = Guidance(true_cfg_scale=5.0), 50
    else:
        scale, scale_low_noise = (3.5, 3.5) if index["_class_name"] == "WanImageToVideoPipeline" else (4.0, 3.0)
        guidance = Guidance(true_cfg_scale=scale, scale_low_noise=scale_low_noise, boundary_ratio=boundary)
        steps = 40
    return _defaults(832, 480, num_frames=81, fps=16.0, steps=steps, guidance=guidance)


def _defaults(width: int, height: int, **others: Any) -> Defaults:
    """A video from a first frame has the aspect ratio of that frame, and as many pixels as other videos."""
    return Defaults(width=width, height=height, image_area=width * height, negative_prompt="", **others)


SINGLE_FILE = SingleFile(
    architectures=("wan",),
    layouts=(
        # names of https://github.com/Wan-Video/Wan2.1
        FileLayout(
            mark="blocks.0.self_attn.q.weight",
            renames=(
                (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
                (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
                (r"^text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
                (r"^text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
                (r"^time_projection\.1\.", "condition_embedder.time_proj."),
                (r"^head\.head\.", "proj_out."),
                (r"^head\.modulation$", "scale_shift_table"),
                (r"\.modulation$", ".scale_shift_table"),
                (r"\.self_attn\.", ".attn1."),
                (r"\.cross_attn\.", ".attn2."),
                (r"\.(q|k|v)\.", r".to_\1."),
                (r"\.o\.", ".to_out.0."),
                (r"\.ffn\.0\.", ".ffn.net.0.proj."),
                (r"\.ffn\.2\.", ".ffn.net.2."),
                (r"\.norm3\.", ".norm2."),
            ),
        ),
    ),
)

SPECS = (
    ModelSpec(
        name="WanPipeline",
        family="wan",
        tasks=(Task.TEXT_TO_VIDEO,),
        pipeline="omni_grpc.models.wan.pipeline_text_to_video:WanPipeline",
        guidance=(GuidanceKind.TRUE_CFG,),
        limits=limits,
        defaults=defaults,
        variant=variant,
        weights={"transformer": CROSS_DIT_WEIGHTS, "transformer_2": CROSS_DIT_WEIGHTS},
        tensor_parallel={"transformer": CROSS_DIT_SPLITS, "transformer_2": CROSS_DIT_SPLITS},
        single_file=SINGLE_FILE,
        schedulers=SCHEDULERS,
        takes=frozenset({"num_frames"}),
    ),
    ModelSpec(
        name="WanImageToVideoPipeline",
        family="wan",
        tasks=(Task.IMAGE_TO_VIDEO,),
        pipeline="omni_grpc.models.wan.pipeline_image_to_video:WanImageToVideoPipeline",
        guidance=(GuidanceKind.TRUE_CFG,),
        limits=limits,
        defaults=defaults,
        variant=variant,
        weights={"transformer": CROSS_DIT_WEIGHTS, "transformer_2": CROSS_DIT_WEIGHTS},
        tensor_parallel={"transformer": CROSS_DIT_SPLITS, "transformer_2": CROSS_DIT_SPLITS},
        single_file=SINGLE_FILE,
        schedulers=SCHEDULERS,
        takes=frozenset({"num_frames", "first_frame", "last_frame"}),
    ),
)
