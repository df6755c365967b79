"""FLUX.1: text to image, and image editing with Kontext. Dual-stream blocks, then single-stream blocks
(https://github.com/black-forest-labs/flux)."""

import dataclasses
from collections.abc import Mapping

from omni_grpc.nn.block_weights import DUAL_STREAM_FUSED, DUAL_STREAM_SPLITS
from omni_grpc.types.request import Guidance, Task
from omni_grpc.types.spec import (
    Configs,
    Defaults,
    FileLayout,
    GuidanceKind,
    Lazy,
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
AXES = (16, 56, 56)
"""RoPE channels of a head for frame, height and width, where the config leaves them out."""
AREA = 1024 * 1024
"""Pixels of the images that the models were trained on."""
SCHEDULERS = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")


def embeds_guidance(configs: Configs) -> bool:
    """True for dev and Kontext, False for schnell, which is distilled to few steps."""
    return bool(configs["transformer"].get("guidance_embeds", False))


def limits(configs: Configs) -> Limits:
    """Schnell was trained on prompts of half the length."""
    most = 512 if embeds_guidance(configs) else 256
    return image_limits(PATCH * vae_scale_factor(configs["vae"]), max_prompt_tokens=most)


def guidance(configs: Configs) -> tuple[GuidanceKind, ...]:
    return (GuidanceKind.EMBEDDED,) * embeds_guidance(configs) + (GuidanceKind.TRUE_CFG,)


def defaults(configs: Configs) -> Defaults:
    """The defaults of the released models."""
    if embeds_guidance(configs):
        return Defaults(width=1024, height=1024, steps=28, guidance=Guidance(scale=3.5))
    return Defaults(width=1024, height=1024, steps=4, guidance=Guidance())


def kontext_limits(configs: Configs) -> Limits:
    return dataclasses.replace(limits(configs), max_input_images=1)


def kontext_defaults(configs: Configs) -> Defaults:
    return dataclasses.replace(defaults(configs), image_area=AREA)


TRANSFORMER_WEIGHTS = WeightMap(
    renames=(
        (r"^transformer_blocks\.", "stack.dual."),
        (r"^single_transformer_blocks\.", "stack.single."),
        (r"\.norm1\.linear\.", ".img_mod."),
        (r"\.norm1_context\.linear\.", ".txt_mod."),
        (r"\.norm\.linear\.", ".mod."),
        (r"\.ff\.net\.0\.proj\.", ".img_mlp.up."),
        (r"\.ff\.net\.2\.", ".img_mlp.down."),
        (r"\.ff_context\.net\.0\.proj\.", ".txt_mlp.up."),
        (r"\.ff_context\.net\.2\.", ".txt_mlp.down."),
        (r"\.attn\.to_out\.0\.", ".attn.to_out."),
    ),
    fused=DUAL_STREAM_FUSED,
)

TRANSFORMER_SPLITS: Mapping[str, Split] = {
    **DUAL_STREAM_SPLITS,
    "stack.single.*.proj_mlp": Split(SplitKind.COLUMN),
    # its input is attention next to an MLP of four times its width
    "stack.single.*.proj_out": Split(SplitKind.ROW, (1, 4)),
}

FUSED_CUTS: Mapping[str, tuple[RowSlice, ...]] = {
    name: tuple(RowSlice(part) for part in parts) for name, parts in DUAL_STREAM_FUSED.items()
}

SINGLE_FILE = SingleFile(
    architectures=("flux",),
    layouts=(
        # names of https://github.com/black-forest-labs/flux
        FileLayout(
            mark="double_blocks.0.img_attn.qkv.weight",
            renames=(
                (r"^time_in\.", "time_text_embed.timestep_embedder."),
                (r"^vector_in\.", "time_text_embed.text_embedder."),
                (r"^guidance_in\.", "time_text_embed.guidance_embedder."),
                (r"\.in_layer\.", ".linear_1."),
                (r"\.out_layer\.", ".linear_2."),
                (r"^img_in\.", "x_embedder."),
                (r"^txt_in\.", "context_embedder."),
                (r"^final_layer\.linear\.", "proj_out."),
                (r"^final_layer\.adaLN_modulation\.1\.", "norm_out.linear."),
                (r"^double_blocks\.", "transformer_blocks."),
                (r"\.img_mod\.lin\.", ".norm1.linear."),
                (r"\.txt_mod\.lin\.", ".norm1_context.linear."),
                (r"\.img_attn\.qkv\.", ".attn.to_qkv."),
                (r"\.txt_attn\.qkv\.", ".attn.add_qkv_proj."),
                (r"\.txt_attn\.norm\.query_norm\.scale$", ".attn.norm_added_q.weight"),
                (r"\.txt_attn\.norm\.key_norm\.scale$", ".attn.norm_added_k.weight"),
                (r"(\.img_attn)?\.norm\.query_norm\.scale$", ".attn.norm_q.weight"),
                (r"(\.img_attn)?\.norm\.key_norm\.scale$", ".attn.norm_k.weight"),
                (r"\.img_attn\.proj\.", ".attn.to_out.0."),
                (r"\.txt_attn\.proj\.", ".attn.to_add_out."),
                (r"\.img_mlp\.0\.", ".ff.net.0.proj."),
                (r"\.img_mlp\.2\.", ".ff.net.2."),
                (r"\.txt_mlp\.0\.", ".ff_context.net.0.proj."),
                (r"\.txt_mlp\.2\.", ".ff_context.net.2."),
                (r"^single_blocks\.", "single_transformer_blocks."),
                (r"\.modulation\.lin\.", ".norm.linear."),
                (r"\.linear2\.", ".proj_out."),
            ),
            cuts={
                **FUSED_CUTS,
                "linear1": (
                    RowSlice("attn.to_q"),
                    RowSlice("attn.to_k"),
                    RowSlice("attn.to_v"),
                    RowSlice("proj_mlp", 4),
                ),
                # the file has (shift, scale), the checkpoint has (scale, shift)
                "norm_out.linear": (RowSlice("norm_out.linear", place=1), RowSlice("norm_out.linear", place=0)),
            },
        ),
    ),
)

OTHER_NAMES = (
    # names of https://github.com/XLabs-AI/x-flux, by stream: 1 is the image's, 2 the text's
    FileLayout(
        mark="double_blocks.0.processor.qkv_lora1.weight",
        renames=(
            (r"^double_blocks\.(\d+)\.processor\.qkv_lora1\.", r"transformer_blocks.\1.attn.to_qkv."),
            (r"^double_blocks\.(\d+)\.processor\.qkv_lora2\.", r"transformer_blocks.\1.attn.add_qkv_proj."),
            (r"^double_blocks\.(\d+)\.processor\.proj_lora1\.", r"transformer_blocks.\1.attn.to_out.0."),
            (r"^double_blocks\.(\d+)\.processor\.proj_lora2\.", r"transformer_blocks.\1.attn.to_add_out."),
            (r"^single_blocks\.(\d+)\.processor\.qkv\.", r"single_transformer_blocks.\1.attn.to_qkv."),
            (r"^single_blocks\.(\d+)\.processor\.proj\.", r"single_transformer_blocks.\1.proj_out."),
        ),
        cuts=FUSED_CUTS,
    ),
)

SPECS = (
    ModelSpec(
        name="FluxPipeline",
        family="flux",
        tasks=(Task.TEXT_TO_IMAGE,),
        pipeline="omni_grpc.models.flux.pipeline_text_to_image:FluxPipeline",
        guidance=guidance,
        limits=limits,
        defaults=defaults,
        weights={"transformer": TRANSFORMER_WEIGHTS},
        tensor_parallel={"transformer": TRANSFORMER_SPLITS},
        single_file=SINGLE_FILE,
        other_names=OTHER_NAMES,
        schedulers=SCHEDULERS,
        # published with TeaCache for FLUX.1-dev (https://arxiv.org/abs/2411.19108); not fitted here
        step_cache={"tea_cache": {"coefficients": (498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861)}},
    ),
    ModelSpec(
        name="FluxKontextPipeline",
        family="flux",
        tasks=(Task.TEXT_TO_IMAGE, Task.IMAGE_EDIT),
        pipeline="omni_grpc.models.flux.pipeline_edit:FluxKontextPipeline",
        preprocess=Lazy("omni_grpc.models.flux.kontext_preprocess:preprocess"),
        guidance=guidance,
        limits=kontext_limits,
        defaults=kontext_defaults,
        weights={"transformer": TRANSFORMER_WEIGHTS},
        tensor_parallel={"transformer": TRANSFORMER_SPLITS},
        single_file=SINGLE_FILE,
        other_names=OTHER_NAMES,
        takes=frozenset({"images"}),
        schedulers=SCHEDULERS,
    ),
)
