"""Which layer of which text encoder a name in a file means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni_grpc.loading.adapters.binding import OTHER, UNKNOWN
from omni_grpc.loading.adapters.encoder_names import DENOISER, EncoderNames, is_encoder, named_encoder
from omni_grpc.loading.adapters.names import TEXT_ENCODER
from omni_grpc.loading.adapters.targets import bind_targets, read_files
from tests.features.suite import save

CLIP = ("encoder.layers.0.self_attn.q_proj", "encoder.layers.0.self_attn.out_proj", "encoder.layers.0.mlp.fc1")
T5 = ("encoder.block.0.layer.0.SelfAttention.q", "encoder.block.0.layer.1.DenseReluDense.wi_0")


@pytest.mark.parametrize(
    ("name", "component", "module"),
    [
        ("text_encoder.text_model.encoder.layers.0.self_attn.q_proj", "text_encoder", CLIP[0]),
        ("base_model.model.text_encoder.encoder.layers.0.self_attn.q_proj", "text_encoder", CLIP[0]),
        ("text_encoder.text_model.encoder.layers.0.self_attn.to_q", "text_encoder", CLIP[0]),
        ("text_encoder.text_model.encoder.layers.0.self_attn.to_out", "text_encoder", CLIP[1]),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", "text_encoder", CLIP[2]),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1", "text_encoder", CLIP[2]),
        ("text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1", "text_encoder", CLIP[2]),
        ("clip_l.transformer.text_model.encoder.layers.0.mlp.fc1", "text_encoder", CLIP[2]),
        ("text_model.encoder.layers.0.mlp.fc1", "text_encoder", CLIP[2]),
        ("lycoris_text_encoder_text_model_encoder_layers_0_mlp_fc1", "text_encoder", CLIP[2]),
        ("text_encoder_2.encoder.block.0.layer.0.SelfAttention.q", "text_encoder_2", T5[0]),
        ("lora_te2_encoder_block_0_layer_0_SelfAttention_q", "text_encoder_2", T5[0]),
        ("lora_te3_encoder_block_0_layer_1_DenseReluDense_wi_0", "text_encoder_2", T5[1]),
        ("t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q", "text_encoder_2", T5[0]),
    ],
)
def test_a_name_is_found_in_the_encoder_that_has_the_layer(name: str, component: str, module: str) -> None:
    tables = {"text_encoder": EncoderNames("text_encoder", CLIP), "text_encoder_2": EncoderNames("text_encoder_2", T5)}
    found = tables.pop(component).find(name)
    assert found.component == component
    assert [part.module for part in found.modules or ()] == [module]
    (other,) = tables.values()
    assert other.find(name).modules is None


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("transformer.blocks.0.attn.to_q", DENOISER),
        ("lora_unet_double_blocks_0_img_attn_qkv", DENOISER),
        ("lora_te1_text_model_encoder_layers_7_mlp_fc1", TEXT_ENCODER),
        ("text_encoder_2.encoder.layers.0.mlp.fc1", "text_encoder_2"),
        ("text_encoder.encoder.layers.7.mlp.fc1", "text_encoder"),
    ],
)
def test_what_an_encoder_does_not_have_is_told_apart(name: str, component: str) -> None:
    found = EncoderNames("text_encoder", CLIP).find(name)
    assert (found.component, found.modules) == (component, None)


def test_components_are_known_by_their_names() -> None:
    assert [is_encoder(name) for name in ("text_encoder", "text_encoder_3", "transformer_2", "text_encoders")] == [
        *(True, True, False, False)
    ]
    assert named_encoder("base_model.model.text_encoder_2.x") == "text_encoder_2"
    assert named_encoder("text_encoders.clip_l.transformer.x") == named_encoder("lora_te1_x") == ""


def test_a_file_that_the_operator_gives_to_an_encoder_needs_no_mark(tmp_path: Path) -> None:
    """Without him, the same names are taken for those of a denoiser."""
    layers = dict.fromkeys(T5, (8, 8))
    save(
        {f"{T5[0]}.lora_A.weight": torch.ones(2, 8), f"{T5[0]}.lora_B.weight": torch.ones(8, 2)},
        tmp_path / "a.safetensors",
    )
    for said, keys, why in (("text_encoder_2", 2, {}), ("", 0, OTHER), ("text_encoder", 0, OTHER)):
        file = read_files("a", {said: tmp_path / "a.safetensors"})
        bound = bind_targets("a", file, "text_encoder_2", layers, denoisers=("transformer",))
        assert len(bound.keys) == keys
        assert set(bound.skipped.values()) == ({why} if why else set())
    other = bind_targets("a", read_files("a", {"text_encoder_2": tmp_path / "a.safetensors"}), "transformer", layers)
    assert set(other.skipped.values()) == {OTHER}
    named = read_files("a", {"transformer": tmp_path / "a.safetensors"})
    assert set(bind_targets("a", named, "transformer", {"x": (8, 8)}).skipped.values()) == {UNKNOWN}
