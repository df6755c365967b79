"""Files of adapters for pipelines: what reaches which layer, in the layouts of other tools, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline
from safetensors.torch import save_file
from torch import Tensor

from omni_grpc.adapter.lora import Adapters
from omni_grpc.adapter.lora_reading import DROPPED
from omni_grpc.adapter.lora_renaming import NotRenamed, renamed
from omni_grpc.loading.adapters import read_adapter
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.lora import Lora

from . import lora_files
from .conftest import refused
from .lora_files import peft

Deltas = Mapping[str, Mapping[str, Tensor]]
"""What is added to the weights, by component and path."""

SEED = torch.Generator()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=SEED) * 0.3


@pytest.fixture(autouse=True)
def seeded() -> None:
    SEED.manual_seed(7)


@pytest.fixture
def pipeline(tiny: Any) -> Callable[[str], Any]:
    return lambda name: DiffusionPipeline.from_pretrained(tiny(name), local_files_only=True)


def loaded(
    pipeline: Any, tensors: Mapping[str, Tensor], folder: Path, header: dict[str, str] | None = None
) -> Adapters:
    file = folder / "x.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata=header)
    adapters = Adapters(pipeline, torch.float32)
    adapters.add("x", file)
    return adapters


def check(pipeline: Any, adapters: Adapters, expected: Deltas, scale: float = 0.5) -> None:
    """Each changed layer computes with W + scale * delta, and no other layer is changed."""
    changed = 0
    with torch.no_grad(), adapters.applied((Lora(lora_id="x", scale=scale),)):
        for component, deltas in expected.items():
            part = getattr(pipeline, component)
            for path, delta in deltas.items():
                layer = part.get_submodule(path)
                base = layer.base_layer
                if base.weight.dim() == 2:
                    x = torch.randn(3, base.weight.shape[1])
                    added = torch.nn.functional.linear(x, delta)
                else:
                    x = torch.randn(1, base.weight.shape[1], 8, 8)
                    added = torch.nn.functional.conv2d(x, delta, stride=base.stride, padding=base.padding)
                wanted, got = base(x) + scale * added, layer(x)
                assert (got - wanted).abs().max() < 1e-4 * max(1.0, float(wanted.detach().abs().max())), path
                assert (scale * added).abs().max() > 1e-2, "it is large enough to be seen"
                changed += 1
    assert changed == sum(len(layers) for layers in adapters._layers.values())


def product(tensors: Mapping[str, Tensor], name: str, scale: float = 1.0) -> Tensor:
    down, up = tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"]
    return scale * (up.flatten(1) @ down.flatten(1)).view(up.shape[0], *down.shape[1:])


def test_alphas_of_sd_scripts_count_layer_by_layer_and_in_text_encoders(pipeline: Any, tmp_path: Path) -> None:
    pipe = pipeline("stable_diffusion")
    wanted = {"unet": ("to_q", "to_out.0", "conv1", "proj_in"), "text_encoder": ("q_proj", "fc1")}
    prefixes = {"unet": "lora_unet_", "text_encoder": "lora_te_text_model_"}
    tensors = lora_files.kohya(pipe, wanted, prefixes, seed=1, alpha=2.0)
    expected: dict[str, dict[str, Tensor]] = {}
    for component, ends in wanted.items():
        for number, path in enumerate(lora_files.layers(getattr(pipe, component), *ends)):
            name = prefixes[component] + path.replace(".", "_")
            expected.setdefault(component, {})[path] = product(tensors, name, 2.0 / (2 + 2 * (number % 2)))
    adapters = loaded(pipe, tensors, tmp_path)
    check(pipe, adapters, expected)
    (adapter,) = adapters.found
    assert (adapter.format, adapter.rank, adapter.skipped) == ("kohya", 4, {})
    assert sum(adapter.applied.values()) == len(tensors)


def test_blocks_of_the_original_unet_are_named_by_diffusers(pipeline: Any, tmp_path: Path) -> None:
    """And a layer of a text encoder beside them, which diffusers alone would stop at."""
    pipe = pipeline("stable_diffusion_xl")
    names = {
        "lora_unet_input_blocks_3_1_transformer_blocks_0_attn1_to_q": (
            "unet", "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
        ),
        "lora_unet_middle_block_1_transformer_blocks_1_ff_net_2": (
            "unet", "mid_block.attentions.0.transformer_blocks.1.ff.net.2",
        ),
        "lora_unet_output_blocks_1_1_transformer_blocks_0_attn2_to_k": (
            "unet", "up_blocks.0.attentions.1.transformer_blocks.0.attn2.to_k",
        ),
        "lora_te2_text_model_encoder_layers_1_mlp_fc1": ("text_encoder_2", "text_model.encoder.layers.1.mlp.fc1"),
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    expected: dict[str, dict[str, Tensor]] = {}
    for number, (name, (component, path)) in enumerate(names.items()):
        rows, columns = getattr(pipe, component).get_submodule(path).weight.shape
        tensors |= {f"{name}.lora_down.weight": random(4, columns), f"{name}.lora_up.weight": random(rows, 4)}
        tensors[f"{name}.alpha"] = torch.tensor(1.0 + number)
        expected.setdefault(component, {})[path] = product(tensors, name, (1.0 + number) / 4)
    adapters = loaded(pipe, tensors, tmp_path)
    check(pipe, adapters, expected)
    assert adapters.found[0].applied == {"unet": 9, "text_encoder": 0, "text_encoder_2": 3}
    assert adapters.found[0].skipped == {}


def test_fused_layers_that_diffusers_cuts_keep_their_alpha_and_a_last_norm_its_order(
    pipeline: Any, tmp_path: Path
) -> None:
    """diffusers takes neither the alpha nor the order of the halves, which are shift and scale in the original."""
    pipe = pipeline("flux2_klein")
    qkv, norm = "diffusion_model.double_blocks.0.img_attn.qkv", "diffusion_model.final_layer.adaLN_modulation.1"
    tensors = {
        f"{qkv}.lora_A.weight": random(4, 128),
        f"{qkv}.lora_B.weight": random(384, 4),
        f"{qkv}.alpha": torch.tensor(2.0),
        f"{norm}.lora_A.weight": random(4, 128),
        f"{norm}.lora_B.weight": random(256, 4),
    }
    attention = 0.5 * tensors[f"{qkv}.lora_B.weight"] @ tensors[f"{qkv}.lora_A.weight"]
    shift, scale = (tensors[f"{norm}.lora_B.weight"] @ tensors[f"{norm}.lora_A.weight"]).chunk(2)
    parts = zip(("to_q", "to_k", "to_v"), attention.chunk(3), strict=True)
    expected = {f"transformer_blocks.0.attn.{name}": rows for name, rows in parts}
    expected["norm_out.linear"] = torch.cat([scale, shift])
    adapters = loaded(pipe, tensors, tmp_path)
    check(pipe, adapters, {"transformer": expected})
    assert adapters.found[0].applied == {"transformer": 5}


def test_layers_that_diffusers_mixes_up_are_named_by_our_own_reader(pipeline: Any, tmp_path: Path) -> None:
    """In OneTrainer's names those of a feed-forward overwrite each other in diffusers."""
    pipe = pipeline("flux")
    paths = ("transformer_blocks.0.ff.net.0.proj", "transformer_blocks.0.ff.net.2", "transformer_blocks.0.attn.to_q")
    tensors, expected = {}, {}
    for path in paths:
        name = "lora_transformer_" + path.replace(".", "_")
        rows, columns = pipe.transformer.get_submodule(path).weight.shape
        tensors |= {f"{name}.lora_down.weight": random(4, columns), f"{name}.lora_up.weight": random(rows, 4)}
        tensors[f"{name}.alpha"] = torch.tensor(4.0)
        expected[path] = product(tensors, name)
    adapters = loaded(pipe, tensors, tmp_path)
    check(pipe, adapters, {"transformer": expected})
    theirs = renamed(read_adapter("x", tmp_path / "x.safetensors"), pipe, ["transformer"])
    assert f"transformer.{paths[2]}.lora_A.weight" in theirs.sources
    assert not any("ff.net" in key for key in theirs.sources)


def test_a_change_of_another_size_than_in_the_file_is_refused(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As conversions make them that forget an alpha of a layer that they cut."""
    pipe = pipeline("flux")
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {f"{name}.lora_down.weight": random(4, 64), f"{name}.lora_up.weight": random(192, 4)}
    save_file(tensors, tmp_path / "x.safetensors")
    file = read_adapter("x", tmp_path / "x.safetensors")
    original = FluxPipeline.lora_state_dict.__func__  # type: ignore[attr-defined]

    def smaller(cls: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(cls, *args, **{**kwargs, "return_alphas": False})
        return {key: 0.5 * tensor if "lora_A" in key else tensor for key, tensor in state.items()}

    renamed(file, pipe, ["transformer"])
    monkeypatch.setattr(FluxPipeline, "lora_state_dict", classmethod(smaller))
    with pytest.raises(NotRenamed, match=r"a change of norm [\d.e+]+ of lora_unet_double_blocks_0_img_attn_qkv, which"):
        renamed(file, pipe, ["transformer"])


def test_biases_whole_differences_and_loha_are_what_they_add(pipeline: Any, tmp_path: Path) -> None:
    pipe = pipeline("wan_t2v")
    q, k, out = "blocks.0.attn1.to_q", "blocks.0.attn1.to_k", "proj_out"
    rows, columns = pipe.transformer.get_submodule(q).weight.shape
    wide = pipe.transformer.get_submodule(out).weight.shape
    tensors = {
        f"{q}.lora_A.weight": random(4, columns),
        f"{q}.lora_B.weight": random(rows, 4),
        f"{q}.alpha": torch.tensor(8.0),
        f"{q}.diff_b": random(rows),
        f"{k}.hada_w1_a": random(rows, 2),
        f"{k}.hada_w1_b": random(2, columns) * 4,
        f"{k}.hada_w2_a": random(rows, 2) * 4,
        f"{k}.hada_w2_b": random(2, columns),
        f"{out}.diff": random(*wide),
        f"{out}.diff_b": torch.zeros(wide[0]),
    }
    tensors = {f"transformer.{key}": tensor for key, tensor in tensors.items()}
    adapters = loaded(pipe, tensors, tmp_path)
    t = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    deltas = {
        q: 2.0 * t[f"{q}.lora_B.weight"] @ t[f"{q}.lora_A.weight"],
        k: (t[f"{k}.hada_w1_a"] @ t[f"{k}.hada_w1_b"]) * (t[f"{k}.hada_w2_a"] @ t[f"{k}.hada_w2_b"]),
        out: t[f"{out}.diff"],
    }
    assert adapters.found[0].skipped == {f"transformer.{out}.diff_b": "zero"}
    assert adapters.found[0].applied == {"transformer": 9, "transformer_2": 0}
    with torch.no_grad(), adapters.applied((Lora(lora_id="x", scale=0.5),)):
        for path, delta in deltas.items():
            layer = pipe.transformer.get_submodule(path)
            x = torch.randn(3, delta.shape[1])
            bias = t[f"{q}.diff_b"] if path == q else 0
            wanted = layer.base_layer(x) + 0.5 * (x @ delta.T + bias)
            assert (layer(x) - wanted).abs().max() < 1e-4 * float(wanted.abs().max())


def test_a_file_without_a_component_is_for_both_experts(pipeline: Any, tmp_path: Path) -> None:
    pipe = pipeline("wan_t2v")
    tensors = {key.removeprefix("transformer."): t for key, t in peft(pipe, {"transformer": ("to_q",)}, seed=1).items()}
    assert loaded(pipe, tensors, tmp_path).found[0].targets == ("transformer", "transformer_2")


def test_the_config_in_the_header_is_read_by_component(pipeline: Any, tmp_path: Path) -> None:
    pipe = pipeline("stable_diffusion")
    tensors = peft(pipe, {"unet": ("to_q",), "text_encoder": ("fc1",)}, seed=1, rank=4)
    config = {"unet.lora_alpha": 2.0, "text_encoder.lora_alpha": 8.0, "text_encoder.r": 4, "unet.r": 4}
    adapters = loaded(pipe, tensors, tmp_path, {"lora_adapter_metadata": json.dumps(config)})
    expected: dict[str, dict[str, Tensor]] = {}
    for component, scale in (("unet", 0.5), ("text_encoder", 2.0)):
        for key, down in tensors.items():
            if key.startswith(f"{component}.") and "lora_A" in key:
                path = key.removeprefix(f"{component}.").removesuffix(".lora_A.weight")
                up = tensors[key.replace("lora_A", "lora_B")]
                expected.setdefault(component, {})[path] = scale * up @ down
    check(pipe, adapters, expected)


def _of(tensors: Mapping[str, Tensor]) -> Callable[[Any], Mapping[str, Tensor]]:
    return lambda pipe: tensors


def _dora(pipe: Any) -> dict[str, Tensor]:
    tensors = lora_files.kohya(pipe, {"unet": ("to_q",)}, {"unet": "lora_unet_"}, seed=1, alpha=2.0)
    return {**tensors, next(iter(tensors)).replace("lora_down.weight", "dora_scale"): torch.ones(16, 1)}


def _magnitudes(pipe: Any) -> dict[str, Tensor]:
    tensors = peft(pipe, {"unet": ("to_q",)}, seed=1)
    return {**tensors, next(iter(tensors)).replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(16)}


def _lokr(pipe: Any) -> dict[str, Tensor]:
    path = lora_files.layers(pipe.unet, "to_q")[0]
    rows, columns = pipe.unet.get_submodule(path).weight.shape
    name = "lycoris_" + path.replace(".", "_")
    return {f"{name}.lokr_w1": random(4, 4), f"{name}.lokr_w2": random(rows // 4, columns // 4)}


def _too_wide(pipe: Any) -> dict[str, Tensor]:
    tensors = peft(pipe, {"unet": ("to_q",)}, seed=1)
    return {key: torch.cat([t, t], 1) if "lora_A" in key else t for key, t in tensors.items()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (_dora, "is DoRA, which diffusers would load as a LoRA without its magnitudes; merge it"),
        (_magnitudes, "is DoRA, which diffusers would load as a LoRA without its magnitudes; merge it"),
        (_lokr, "is a LoKr, which diffusers pipelines do not take here; extract a LoRA from it, or"),
        (_too_wide, "changes a weight .*, the model's is"),
        (_of({"x.lora_A.weight": random(4, 8), "x.lora_B.weight": random(8, 4)}), "no key of x.safetensors fits a lay"),
        (_of({"other": random(4, 8)}), "has no LoRA layers; it begins with other"),
    ],
)
def test_a_file_that_would_do_something_else_is_refused(
    tensors: Any, message: str, pipeline: Any, tmp_path: Path
) -> None:
    pipe = pipeline("stable_diffusion")
    with pytest.raises(ConfigError, match=message) as caught:
        loaded(pipe, tensors(pipe), tmp_path)
    assert (refused(caught.value), caught.value.reason) == ({"lora"}, "BAD_LORA")


def test_keys_that_change_nothing_are_told_with_the_reason(pipeline: Any, tmp_path: Path) -> None:
    pipe = pipeline("flux")
    tensors = peft(pipe, {"transformer": ("to_q",)}, seed=1)
    zero = "transformer.transformer_blocks.0.attn.to_k"
    more = {
        f"{zero}.lora_A.weight": random(4, 128),
        f"{zero}.lora_B.weight": torch.zeros(128, 4),
        "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight": random(4, 32),
        "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q.lora_B.weight": random(32, 4),
        "transformer.no_such.lora_A.weight": random(4, 128),
        "transformer.no_such.lora_B.weight": random(64, 4),
        "transformer.something": random(2),
    }
    (adapter,) = loaded(pipe, {**tensors, **more}, tmp_path).found
    reasons = ["zero", "zero", *["text encoder"] * 2, *["no such layer in the model"] * 2]
    assert adapter.skipped == {
        **dict(zip(list(more)[:-1], reasons, strict=True)),
        "transformer.something": "no part of an adapter that is known",
    }
    assert adapter.applied == {"transformer": len(tensors), "text_encoder": 0}


def test_keys_that_diffusers_leaves_out_are_told_too(pipeline: Any, tmp_path: Path) -> None:
    """Of FLUX.2 in the names of sd-scripts it drops the modulation, with a line in its log."""
    pipe = pipeline("flux2_klein")
    names = {"lora_unet_double_blocks_0_img_attn_proj": 128, "lora_unet_double_stream_modulation_img_lin": 768}
    tensors = {}
    for name, rows in names.items():
        tensors |= {f"{name}.lora_down.weight": random(4, 128), f"{name}.lora_up.weight": random(rows, 4)}
        tensors[f"{name}.alpha"] = torch.tensor(4.0)
    (adapter,) = loaded(pipe, tensors, tmp_path).found
    assert adapter.applied == {"transformer": 3}
    assert set(adapter.skipped.values()) == {DROPPED}
    assert set(adapter.skipped) == {key for key in tensors if "modulation" in key}


def test_a_pipeline_that_diffusers_has_no_adapters_for_is_refused_by_name(pipeline: Any, tmp_path: Path) -> None:
    tensors = {"transformer.x.lora_A.weight": random(4, 8), "transformer.x.lora_B.weight": random(8, 4)}
    with pytest.raises(
        ConfigError, match="loads no adapters into HunyuanVideo15Pipeline; merge the adapter into"
    ) as why:
        loaded(pipeline("hunyuan_video15"), tensors, tmp_path)
    assert refused(why.value) == {"lora"}
