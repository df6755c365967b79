"""Settings of the adapter: what they do to a pipeline, and which are refused by name."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from omni_grpc.adapter import caches
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import DIFFUSERS_CACHES, AdapterConfig, EngineConfig
from omni_grpc.resolve.settings import SHARED, check_settings
from omni_grpc.types.errors import CheckpointError, ConfigError

from .conftest import equal, refused, same_memory

SMALL = {"width": 64, "height": 64, "steps": 3, "seeds": (1,)}
SHORT = {**SMALL, "num_frames": 5}
NO_SUCH_CONFIG = {"quant_mapping": {"transformer": {"class": "Nope"}}}
VALUES = {
    "diffusers_load_kwargs": {"variant": "fp16"},
    "diffusers_call_kwargs": {"eta": 0.0},
    "allow_attention_fallback": True,
    "boundary_ratio": 0.5,
    "flow_shift": 3.0,
    "vae_use_slicing": True,
    "vae_use_tiling": True,
    "enable_cpu_offload": True,
}


NOT_NATIVE = [field.name for field in dataclasses.fields(AdapterConfig) if field.name not in SHARED]


@pytest.mark.parametrize("name", NOT_NATIVE)
def test_a_native_model_refuses_every_setting_of_the_adapter(name, tiny):
    folder = tiny("qwen_image")
    config = EngineConfig.from_settings(model=str(folder), **{name: VALUES[name]})
    with pytest.raises(ConfigError, match=name.replace("_", "-")) as caught:
        check_settings(config, open_checkpoint(folder))
    assert refused(caught.value) == {name}
    asked = EngineConfig.from_settings(model="x", diffusion_load_format="diffusers", **{name: VALUES[name]})
    check_settings(asked, open_checkpoint(folder, load_format="diffusers"))


@pytest.mark.parametrize(
    ("load_format", "settings", "field", "message"),
    [
        ("native", {"cache_backend": "taylorseer"}, "cache_backend", "which is native; choose from auto, tea_cache"),
        ("native", {"cache_backend": "pab"}, "cache_backend", "which is native; choose from auto, tea_cache"),
        ("native", {"cache_config": {"rel_l1_thresh": 0.1}}, "cache_config", "needs --cache-backend"),
        (
            "native",
            {"cache_backend": "tea_cache", "cache_config": {"thresh": 1}},
            "cache_config",
            "has unknown keys thresh",
        ),
        ("native", {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": -1}}, "cache_config", "is -1"),
        ("native", {"cache_backend": "tea_cache", "cache_config": {"coefficients": ["x"]}}, "cache_config", "'x'"),
        ("native", {"ignored_layers": "attn"}, "ignored_layers", "needs --quantization"),
        ("native", {"layerwise_resident_blocks": 1}, "layerwise_resident_blocks", "needs --enable-layerwise-offload"),
        (
            "native",
            {"enable_layerwise_offload": True, "cuda_graph_tokens": 64},
            "cuda_graph_tokens",
            "does not work with --enable-layerwise-offload",
        ),
        ("diffusers", {"cuda_graph_tokens": 0}, "cuda_graph_tokens", "runs through diffusers"),
        (
            "diffusers",
            {"enable_cpu_offload": True, "enable_layerwise_offload": True},
            "enable_layerwise_offload",
            "excludes --enable-cpu-offload; choose one",
        ),
        (
            "diffusers",
            {"enable_layerwise_offload": True, "layerwise_resident_blocks": 1},
            "layerwise_resident_blocks",
            "runs through diffusers",
        ),
        (
            "diffusers",
            {"diffusion_attention_config": {"per_role": {"self": "sdpa"}, "default": {"precision": "bf16"}}},
            "diffusion_attention_config",
            "has per_role, precision, which has no effect",
        ),
        (
            "diffusers",
            {"cache_backend": "tea_cache"},
            "cache_backend",
            "runs through diffusers; choose from first_block",
        ),
        ("diffusers", {"quantization": "int8"}, "quantization", "quantization_config"),
        ("diffusers", {"batch_invariant": True}, "batch_invariant", "runs through diffusers"),
    ],
)
def test_a_feature_that_the_load_format_does_not_have_is_refused_with_those_it_has(
    load_format, settings, field, message, tiny
):
    config = EngineConfig.from_settings(model="x", **settings)
    with pytest.raises(ConfigError, match=message) as caught:
        check_settings(config, open_checkpoint(tiny("qwen_image"), load_format=load_format))
    assert refused(caught.value) == {field}


@pytest.mark.parametrize(
    ("load_format", "settings"),
    [
        ("native", {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0, "coefficients": [1, 0]}}),
        ("native", {"quantization": "int8", "ignored_layers": "attn", "enable_layerwise_offload": True}),
        ("native", {"lora": {"a": "b.safetensors"}}),
        ("diffusers", {"lora": {"a": "b.safetensors"}}),
        ("diffusers", {"cache_backend": "first_block", "enable_layerwise_offload": True}),
    ],
)
def test_a_feature_that_the_load_format_has_is_taken(load_format, settings, tiny):
    config = EngineConfig.from_settings(model="x", **settings)
    check_settings(config, open_checkpoint(tiny("qwen_image"), load_format=load_format))


def test_the_caches_that_settings_know_are_those_that_there_are():
    assert set(DIFFUSERS_CACHES) == set(caches.KINDS)


def test_arguments_of_diffusers_need_its_format_and_a_cache_config_its_cache(tiny):
    checkpoint = open_checkpoint(tiny("stable_diffusion"))  # not native: auto takes the adapter
    for name in ("diffusers_load_kwargs", "diffusers_call_kwargs"):
        config = EngineConfig.from_settings(model="x", **{name: VALUES[name]})
        with pytest.raises(ConfigError, match="--diffusion-load-format diffusers"):
            check_settings(config, checkpoint)
    check_settings(EngineConfig.from_settings(model="x", vae_use_slicing=True), checkpoint)
    config = EngineConfig.from_settings(model="x", cache_config={"threshold": 0.1})
    with pytest.raises(ConfigError, match="needs --cache-backend"):
        check_settings(config, checkpoint)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("flux", {"diffusers_load_kwargs": {"flow_shift": 3}}, "would ignore flow_shift"),
        ("flux", {"diffusers_load_kwargs": {"use_safetensors": False}}, "convert"),
        ("flux", {"diffusers_load_kwargs": {"dtype": "float17"}}, "'float17' is no dtype"),
        ("flux", {"diffusers_call_kwargs": {"num_step": 3}}, "'num_step' is no parameter of FluxPipeline"),
        ("flux", {"diffusers_call_kwargs": {"output_type": "pt"}}, "is set by the adapter"),
        ("flux", {"boundary_ratio": 0.5}, "no boundary"),
        ("stable_diffusion", {"flow_shift": 3.0}, "PNDMScheduler has no shift"),
        ("flux", {"enable_cpu_offload": True}, "needs an accelerator"),
        ("flux", {"diffusers_load_kwargs": {"quantization_config": NO_SUCH_CONFIG}}, "'Nope'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_at_start(name, settings, message, load):
    with pytest.raises(ConfigError, match=message) as caught:
        load(name, **settings)
    assert refused(caught.value) & settings.keys()


def test_load_kwargs_win(load):
    adapter = load("flux", diffusers_load_kwargs={"dtype": "bfloat16"})
    assert adapter.pipeline.transformer.dtype is torch.bfloat16
    assert load("flux").pipeline.transformer.dtype is torch.float32
    assert load("flux", diffusers_load_kwargs={"torch_dtype": "bfloat16"}).pipeline.vae.dtype is torch.bfloat16


def test_a_folder_without_weights_does_not_load(tiny, tmp_path, load):
    shutil.copytree(tiny("flux"), tmp_path / "flux")
    (tmp_path / "flux" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="does not load"):
        load(tmp_path / "flux")


def test_boundary_ratio_moves_the_split_between_the_experts(load):
    forwards = {}
    for ratio in (None, 0.3):
        adapter = load("wan_t2v", **({} if ratio is None else {"boundary_ratio": ratio}))
        counts = forwards[ratio] = []
        adapter.pipeline.transformer.register_forward_pre_hook(lambda *_, counts=counts: counts.append(1))
        adapter.run(**SHORT)
    assert len(forwards[0.3]) > len(forwards[None]) > 0


def test_flow_shift_changes_the_schedule(load):
    usual, shifted = load("wan_t2v"), load("wan_t2v", flow_shift=8.0)
    assert shifted.pipeline.scheduler.config.flow_shift == 8.0
    sigmas = [[progress.sigma for progress in adapter.run(**SHORT).progress] for adapter in (usual, shifted)]
    assert sigmas[1][1] > sigmas[0][1]


def test_vae_switches_are_on(load):
    pipeline = load("flux", vae_use_slicing=True, vae_use_tiling=True).pipeline
    assert pipeline.vae.use_slicing
    assert pipeline.vae.use_tiling
    assert not load("flux").pipeline.vae.use_slicing


@pytest.mark.parametrize(
    ("name", "asked"), [("flux", SMALL), ("ltx", {**SMALL, "num_frames": 9}), ("qwen_image", SMALL)]
)
def test_layerwise_offload_changes_nothing_but_memory(name, asked, load):
    resident, offloaded = load(name), load(name, enable_layerwise_offload=True)
    same_memory(resident.pipeline, resident.pipeline)
    assert any(hooked(module) for module in offloaded.pipeline.transformer.modules())
    outputs = [adapter.run(**asked).output for adapter in (resident, offloaded)]
    assert abs(outputs[0] - outputs[1]).max() < 1e-5
    assert equal(offloaded.run(**asked).output, outputs[1])
    # a VAE is entered by its decode: what hangs on its own forward would stay where it is
    vae = offloaded.pipeline.vae
    owners = [module for path, module in vae.named_modules() if path and list(module.parameters(recurse=False))]
    above = {
        id(below) for module in vae.modules() if module is not vae and hooked(module) for below in module.modules()
    }
    assert owners
    assert all(id(module) in above for module in owners)


def hooked(module):
    registry = getattr(module, "_diffusers_hook", None)
    return registry is not None and registry.get_hook("group_offloading") is not None


def test_a_pipeline_that_cannot_be_offloaded_by_blocks_is_refused(load, monkeypatch):
    from diffusers import FluxTransformer2DModel

    monkeypatch.setattr(FluxTransformer2DModel, "_supports_group_offloading", False)
    with pytest.raises(ConfigError, match="FluxTransformer2DModel cannot be offloaded by blocks") as caught:
        load("flux", enable_layerwise_offload=True)
    assert refused(caught.value) == {"enable_layerwise_offload"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"class": "TorchAoConfig", "quant_type": {"class": "Int9Config"}},
            "'Int9Config', no class of diffusers, transf",
        ),
        ({"class": "transformers.Nope"}, r"'transformers\.Nope'"),
        ({"class": "os.system"}, r"'os\.system', no class of"),
    ],
)
def test_a_quantisation_names_classes_of_its_libraries(entry, message, load):
    config = {"quant_mapping": {"transformer": entry}}
    with pytest.raises(ConfigError, match=message):
        load("flux", diffusers_load_kwargs={"quantization_config": config})


def test_the_bytes_of_weights_are_those_that_are_stored():
    from omni_grpc.adapter.loading import weight_bytes

    class Pair(torch.nn.Parameter):
        """Two bytes that stand in for a number of four."""

        def __tensor_flatten__(self):
            return ["low", "high"], None

    linear = torch.nn.Linear(3, 5)
    assert weight_bytes([linear, None, "tokenizer"]) == 4 * (15 + 5)
    linear.weight = Pair(linear.weight.data)
    linear.weight.low, linear.weight.high = (torch.zeros(5, 3, dtype=torch.int8) for _ in range(2))
    assert weight_bytes([linear]) == 2 * 15 + 4 * 5
