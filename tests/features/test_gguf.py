"""Denoisers from GGUF files: what they compute, what they keep, and what is told of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from omni_grpc import Omni
from omni_grpc.loading.checkpoint import WEIGHT_FILE
from omni_grpc.nn.packed_linear import PackedLinear
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.lora import Lora
from omni_grpc.types.media import ImageFormat
from tests.features.suite import denoisers, save
from tests.gguf_files import FLUX, KINDS, WAN, Z_IMAGE, checkpoint_names, convert, original_names
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tools.tiny_checkpoints import build_flux, build_qwen_image, build_wan_t2v, build_z_image


@dataclasses.dataclass(frozen=True)
class Packed:
    """A checkpoint, the settings for GGUF files of its denoisers, and a checkpoint with the numbers of the files."""

    entry: str
    folder: Path
    files: tuple[Path, ...]
    numbers: Path
    settings: dict[str, Any]

    def model(self, **more: Any) -> Model:
        return Model(ENTRIES[self.entry], self.folder, **(self.settings | more))

    def plain(self, **more: Any) -> Model:
        return Model(ENTRIES[self.entry], self.numbers, **more)


def pack(
    folder: Path, entry: str, build: Callable[[Path], Path], architecture: str | None, table: Any = None, **more: Any
) -> Packed:
    names = checkpoint_names if table is None else original_names(table)
    checkpoint, file = build(folder / "checkpoint"), folder / "file.gguf"
    numbers = convert(checkpoint, file, architecture, names, **more)
    return Packed(entry, checkpoint, (file,), numbers, {"quantization": "gguf", "gguf_model": str(file)})


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """256 channels, the fewest that K-quants take."""
    folder = tmp_path_factory.mktemp("qwen")
    return pack(folder, "QwenImagePipeline", lambda to: build_qwen_image(to, heads=8), "qwen_image")


@pytest.fixture(scope="module", params=["original", "checkpoint"])
def flux(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    folder = tmp_path_factory.mktemp("flux")
    table = FLUX if request.param == "original" else None
    return pack(folder, "FluxPipeline", lambda to: build_flux(to, heads=8, layers=1), "flux", table)


def same(mine: Model, theirs: Model, **changes: Any) -> bool:
    drafts = [mine.draft(**changes), mine.guided(steps=3, wider=1, **changes)]
    pairs = zip(mine.run(*drafts), theirs.run(*drafts), strict=True)
    return all(a.latents.isfinite().all() and torch.equal(a.latents, b.latents) for a, b in pairs)


def test_qwen_image_is_the_model_with_the_numbers_of_the_file(qwen: Packed) -> None:
    model = qwen.model()
    assert same(model, qwen.plain())
    kinds = {kind for name in model.ready.found.quantized_layers for kind in name.removeprefix("gguf ").split("+")}
    assert kinds == set(KINDS)
    layers = [part for part in model.pipeline.modules() if isinstance(part, PackedLinear)]
    assert sum(model.ready.found.quantized_layers.values()) == len(layers)
    fused = model.pipeline.transformer.stack.get_submodule("dual.0.attn.to_qkv")
    assert len({packing.name for packing, _ in fused.runs}) == 3, "query, key and value are packed in three ways"
    assert model.ready.weight_bytes < 0.5 * qwen.plain().ready.weight_bytes


def test_in_bfloat16_it_is_the_model_with_rounded_numbers(qwen: Packed) -> None:
    model = qwen.model(dtype="bfloat16")
    assert same(model, qwen.plain(dtype="bfloat16"))
    kept = model.ready.found.quantized_layers
    assert not kept.keys() & {"gguf F16", "gguf BF16"}, "what has 16 bits anyway is loaded as it is"
    assert sum(kept.values()) < 26


def test_flux_is_the_model_with_the_numbers_of_the_file(flux: Packed) -> None:
    assert same(flux.model(), flux.plain())


@pytest.mark.parametrize("table", [Z_IMAGE, None], ids=["original", "checkpoint"])
def test_z_image_is_the_model_with_the_numbers_of_the_file(table: Any, tmp_path: Path) -> None:
    packed = pack(
        tmp_path, "ZImagePipeline", lambda to: build_z_image(to, heads=8, head_dim=32, layers=1), "lumina2", table
    )
    assert same(packed.model(), packed.plain())


@pytest.mark.parametrize("table", [WAN, None], ids=["original", "checkpoint"])
def test_wan_takes_a_file_for_each_expert(table: Any, tmp_path: Path) -> None:
    names = checkpoint_names if table is None else original_names(table)
    folder, files = build_wan_t2v(tmp_path / "checkpoint"), [tmp_path / "high.gguf", tmp_path / "low.gguf"]
    high = convert(folder, files[0], "wan", names)
    numbers = convert(high, files[1], "wan", names, component="transformer_2")
    given = f"transformer={files[0]},transformer_2={files[1]}"
    settings = {"quantization": "gguf", "gguf_model": given}
    assert same(Model(ENTRIES["WanPipeline"], folder, **settings), Model(ENTRIES["WanPipeline"], numbers), seeds=(1,))


@pytest.mark.parametrize("architecture", [None, "pig"])
def test_files_of_other_tools_are_known_by_their_names(architecture: str | None, tmp_path: Path) -> None:
    prefix = "model.diffusion_model."
    packed = pack(
        tmp_path, "FluxPipeline", lambda to: build_flux(to, heads=4, layers=1), architecture, FLUX, prefix=prefix
    )
    assert same(packed.model(), packed.plain())


def test_adapters_work_around_packed_layers(qwen: Packed, tmp_path: Path) -> None:
    weights = safetensors.torch.load_file(qwen.numbers / "transformer" / WEIGHT_FILE)
    generator = torch.Generator().manual_seed(3)
    factors = {}
    for name, weight in weights.items():
        if name.endswith(".weight") and weight.dim() == 2 and ".attn." in name:
            layer = name.removesuffix(".weight")
            factors[f"{layer}.lora_A.weight"] = torch.randn(2, weight.shape[1], generator=generator) / 50
            factors[f"{layer}.lora_B.weight"] = torch.randn(weight.shape[0], 2, generator=generator) / 50
    save(factors, tmp_path / "a.safetensors")
    lora = {"lora": {"a": str(tmp_path / "a.safetensors")}}
    model, plain = qwen.model(**lora), qwen.plain(**lora)
    assert model.ready.found.loras[0].keys_applied == len(factors)
    changes = {"loras": (Lora(lora_id="a", scale=1.0),)}
    assert same(model, plain, **changes)
    (changed,), (without,) = model.run(model.draft(**changes)), model.run(model.draft())
    assert not torch.equal(changed.latents, without.latents)


def test_offload_moves_packed_bytes(qwen: Packed) -> None:
    model, offloaded = qwen.model(), qwen.model(enable_layerwise_offload=True)
    assert same(model, offloaded)
    stack = offloaded.pipeline.transformer.stack
    kept = [tensor for part in stack.modules() for tensor in getattr(part, "host", {}).values()]
    packed = [tensor for tensor in kept if tensor.dtype == torch.uint8]
    layers = [part for part in model.pipeline.transformer.stack.modules() if isinstance(part, PackedLinear)]
    assert sum(tensor.nbytes for tensor in packed) == sum(layer.packed.nbytes for layer in layers)
    assert not any(part.packed.numel() for part in stack.modules() if isinstance(part, PackedLinear))


def test_a_layer_that_is_spread_over_ranks_is_refused_by_name(qwen: Packed) -> None:
    from omni_grpc.config import QuantizationConfig
    from omni_grpc.features import Context, gguf
    from omni_grpc.loading.gguf import GgufFile
    from omni_grpc.nn.linear import Linear

    class Share(Linear):
        """What another feature would have put in the place of a layer."""

    model = qwen.plain()
    module = denoisers(model)["transformer"]
    layer = module.get_submodule("stack.dual.1.img_mlp.down")
    shared = Share(layer.in_features, layer.out_features, stream=layer.stream)
    module.set_submodule("stack.dual.1.img_mlp.down", shared)
    served, weights = model.spec.single_file, model.spec.weights["transformer"]
    assert served is not None
    places = GgufFile.open(qwen.files[0], served, "QwenImagePipeline").places(module, weights)
    context = Context(component="transformer", spec=model.spec, device=model.device, dtype=torch.float32, places=places)
    with pytest.raises(ConfigError, match=r"transformer\.stack\.dual\.1\.img_mlp\.down is spread over several ranks"):
        gguf.apply(module, QuantizationConfig(quantization="gguf"), context)


def test_a_layer_that_another_rank_has_is_passed_over(qwen: Packed) -> None:
    """Where ranks have ranges of blocks, or share experts."""
    from omni_grpc.config import QuantizationConfig
    from omni_grpc.features import Context, gguf
    from omni_grpc.loading.gguf import GgufFile
    from omni_grpc.nn.linear import Elsewhere

    model, path = qwen.plain(), "stack.dual.1.img_mlp.down"
    module = denoisers(model)["transformer"]
    module.set_submodule(path, Elsewhere(module.get_submodule(path)))
    served, weights = model.spec.single_file, model.spec.weights["transformer"]
    assert served is not None
    places = GgufFile.open(qwen.files[0], served, "QwenImagePipeline").places(module, weights)
    context = Context(component="transformer", spec=model.spec, device=model.device, dtype=torch.float32, places=places)
    gguf.apply(module, QuantizationConfig(quantization="gguf"), context)
    assert isinstance(module.get_submodule(path), Elsewhere)
    assert isinstance(module.get_submodule("stack.dual.0.img_mlp.down"), PackedLinear)


def test_a_file_that_packs_nothing_is_an_error(qwen: Packed, tmp_path: Path) -> None:
    convert(qwen.folder, tmp_path / "plain.gguf", "qwen_image", kinds={})
    with pytest.raises(ConfigError, match=r"has no layer of transformer in fewer bits than torch\.float32") as caught:
        qwen.model(gguf_model=str(tmp_path / "plain.gguf"))
    assert caught.value.reason == "NOTHING_QUANTIZED"
    assert [violation.field for violation in caught.value.violations] == ["gguf_model"]


def test_the_reply_counts_layers_by_type(qwen: Packed) -> None:
    small = {"width": 32, "height": 32, "seed": 7, "steps": 1, "output_format": ImageFormat.RAW_RGB8}
    local = {"device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0}
    with Omni(str(qwen.folder), **local, **qwen.settings) as omni:
        counts = omni.generate("a star", **small).effective.quantized_layers
    assert counts["gguf Q4_K"] == 3
    assert sum(counts.values()) == 26
    assert all(name.startswith("gguf ") for name in counts)


def test_the_unpacked_weights_share_one_place(qwen: Packed) -> None:
    model = qwen.model()
    model.run(model.draft())
    layers = [part for part in model.pipeline.modules() if isinstance(part, PackedLinear)]
    (workspace,) = {layer.workspace for layer in layers}
    largest = max(math.prod(layer.shapes()["weight"]) for layer in layers)
    assert workspace._memory.nbytes == 4 * largest


@torch.inference_mode()
def test_the_place_of_the_unpacked_weights_stays_where_it_is(qwen: Packed) -> None:
    """From the first layer on, however small: a graph that was captured unpacks there."""
    layers = [part for part in qwen.model().pipeline.modules() if isinstance(part, PackedLinear)]
    (workspace,) = {layer.workspace for layer in layers}
    layers.sort(key=lambda layer: math.prod(layer.shapes()["weight"]))
    places = set()
    for layer in layers:
        layer(torch.zeros(1, layer.in_features))
        places.add(workspace._memory.data_ptr())
    assert len(places) == 1
