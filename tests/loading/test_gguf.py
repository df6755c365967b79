"""GGUF files by themselves: how names are translated, what is refused, and what loading and running keeps in memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from diffusers.loaders import single_file_utils

from omni_grpc.checkpoint.registry import open_checkpoint, open_model, specs
from omni_grpc.config import EngineConfig
from omni_grpc.loading.checkpoint import WEIGHT_FILE
from omni_grpc.loading.gguf import GgufFile
from omni_grpc.omni import Omni
from omni_grpc.resolve.settings import apply_settings, check_settings
from omni_grpc.types.errors import CheckpointError, ConfigError
from tests.gguf_files import FLUX, WAN, Z_IMAGE, convert, joined, original_names, parted, write
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tools.pack_gguf import pack
from tools.tiny_checkpoints import build_wan_single, build_wan_t2v, build_z_image

BAD = "BAD_GGUF"


@pytest.fixture(scope="module")
def file(tiny_qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "q.gguf"
    convert(tiny_qwen_image, path, "qwen_image")
    return path


def opened(path: Path, name: str = "QwenImagePipeline") -> GgufFile:
    served = specs()[name].single_file
    assert served is not None
    return GgufFile.open(path, served, name)


def load(folder: Path, path: Path) -> Model:
    return Model(ENTRIES["QwenImagePipeline"], folder, quantization="gguf", gguf_model=str(path))


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "table", "converter"),
    [
        (build_z_image, Z_IMAGE, "convert_z_image_transformer_checkpoint_to_diffusers"),
        (build_wan_single, WAN, "convert_wan_transformer_to_diffusers"),
    ],
)
def test_original_names_are_those_that_diffusers_converts(
    build: Any, table: Any, converter: str, tmp_path: Path
) -> None:
    """The files of these tests are made with tables of their own, which could be wrong as ours could be."""
    weights = safetensors.torch.load_file(build(tmp_path / "c") / "transformer" / WEIGHT_FILE)
    original = joined(weights, original_names(table)(weights))
    converted = getattr(single_file_utils, converter)(dict(original))
    assert converted.keys() == weights.keys()
    assert all(torch.equal(converted[name], weights[name]) for name in weights)


def test_original_names_of_flux_are_those_that_diffusers_converts() -> None:
    """diffusers converts the released size alone, so these weights have shapes and no numbers."""
    config = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}
    import diffusers

    with torch.device("meta"):
        weights = dict(diffusers.FluxTransformer2DModel(**config).state_dict())
    original = joined(weights, original_names(FLUX)(weights))
    shapes = {name: tensor.shape for name, tensor in original.items()}
    assert shapes["single_blocks.0.linear1.weight"] == (21504, 3072)
    converted = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers(dict(original))
    assert {name: x.shape for name, x in converted.items()} == {name: x.shape for name, x in weights.items()}


def test_original_names_of_flux_keep_their_rows_in_order(tmp_path: Path) -> None:
    channels = 8
    generator = torch.Generator().manual_seed(0)
    names = {
        "single_transformer_blocks.0.attn.to_q.weight": channels,
        "single_transformer_blocks.0.attn.to_k.weight": channels,
        "single_transformer_blocks.0.attn.to_v.weight": channels,
        "single_transformer_blocks.0.proj_mlp.weight": 4 * channels,
        "transformer_blocks.0.attn.add_q_proj.weight": channels,
        "transformer_blocks.0.attn.add_k_proj.weight": channels,
        "transformer_blocks.0.attn.add_v_proj.weight": channels,
        "transformer_blocks.0.attn.to_q.weight": channels,
        "transformer_blocks.0.attn.to_k.weight": channels,
        "transformer_blocks.0.attn.to_v.weight": channels,
        "norm_out.linear.weight": 2 * channels,
    }
    weights = {name: torch.randn(rows, channels, generator=generator) for name, rows in sorted(names.items())}
    pieces = original_names(FLUX)(weights)
    tensors = joined(weights, pieces)
    q, k, v, mlp = tensors["single_blocks.0.linear1.weight"].split([8, 8, 8, 32])
    for part, name in zip((q, k, v, mlp), list(names)[:4], strict=True):
        assert torch.equal(part, weights[name])
    shift, scale = tensors["final_layer.adaLN_modulation.1.weight"].chunk(2)
    assert torch.equal(torch.cat([scale, shift]), weights["norm_out.linear.weight"])
    write(tmp_path / "f.gguf", tensors, "flux", kinds={})
    read = opened(tmp_path / "f.gguf", "FluxPipeline")
    assert read.tensors.keys() == weights.keys()
    back = parted(tensors, weights, pieces)
    for name, weight in weights.items():
        bytes_of = read._bytes(read.tensors[name].segments)
        assert torch.equal(bytes_of.view(torch.float32).view(weight.shape), weight), name
        assert torch.equal(back[name], weight)


def test_of_a_whole_model_only_the_denoiser_is_read(tmp_path: Path) -> None:
    tensors = {"model.diffusion_model.img_in.weight": torch.ones(4, 8), "first_stage_model.x.weight": torch.ones(2, 8)}
    write(tmp_path / "w.gguf", tensors, None, kinds={})
    assert opened(tmp_path / "w.gguf").tensors.keys() == {"img_in.weight"}


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(path: Path, message: str, name: str = "QwenImagePipeline") -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(path, name)
    assert caught.value.reason == BAD
    assert str(path) in str(caught.value)


def test_a_file_that_is_cut_off_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    for size in (0, 3, 20, 4096, len(whole) // 2, len(whole) - 64):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        refused(tmp_path / "cut.gguf", "is no GGUF file, or not all of it is there")
    (tmp_path / "other.gguf").write_bytes(b"PK\3\4" + whole[4:])
    refused(tmp_path / "other.gguf", "is no GGUF file")
    refused(tmp_path / "nowhere.gguf", "is no GGUF file")


def test_a_file_of_another_model_is_refused(file: Path) -> None:
    refused(file, "is of architecture 'qwen_image', and FluxPipeline takes flux", "FluxPipeline")


def test_types_that_are_not_served_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "qwen_image")
    kind = gguf.GGMLQuantizationType.IQ4_XS
    writer.add_tensor("img_in.weight", np.zeros((4, 136), dtype=np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "t.gguf", r"1 tensors of types that are not served: img_in\.weight \(IQ4_XS\); served: F32, F16")


def test_weights_that_are_missing_or_too_many_are_named(tiny_qwen_image: Path, tmp_path: Path) -> None:
    weights = safetensors.torch.load_file(tiny_qwen_image / "transformer" / WEIGHT_FILE)
    lost = weights.pop("transformer_blocks.1.attn.to_k.weight")
    write(tmp_path / "m.gguf", weights | {"more.weight": lost}, "qwen_image")
    with pytest.raises(CheckpointError, match=r"missing: .*stack\.dual\.1\.attn\.to_qkv\.weight \(part .*more\.weight"):
        load(tiny_qwen_image, tmp_path / "m.gguf")
    weights["transformer_blocks.1.attn.to_k.weight"] = lost[:-1]
    write(tmp_path / "s.gguf", weights, "qwen_image")
    with pytest.raises(CheckpointError, match=r"wrong shape: .*transformer_blocks\.1\.attn\.to_k\.weight"):
        load(tiny_qwen_image, tmp_path / "s.gguf")


def test_names_that_no_layout_has_are_refused(tiny_qwen_image: Path, tmp_path: Path) -> None:
    write(tmp_path / "n.gguf", {"blk.0.ffn_up.weight": torch.ones(4, 32)}, "qwen_image")
    with pytest.raises(
        CheckpointError, match=r"in no way that is known .*begins with blk\.0\.ffn_up\.weight"
    ) as caught:
        load(tiny_qwen_image, tmp_path / "n.gguf")
    assert caught.value.reason == BAD


def test_a_matrix_that_was_packed_in_another_shape_has_its_own(tmp_path: Path) -> None:
    values = torch.arange(4 * 96, dtype=torch.float32)
    writer = gguf.GGUFWriter(tmp_path / "o.gguf", "qwen_image")
    writer.add_array("comfy.gguf.orig_shape.img_in.weight", [4, 96])
    writer.add_tensor("img_in.weight", values.reshape(3, 128).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert opened(tmp_path / "o.gguf").tensors["img_in.weight"].shape == (4, 96)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"quantization": "gguf"}, "gguf_model", "is required by --quantization gguf"),
        ({"gguf_model": "FILE"}, "gguf_model", "needs --quantization gguf"),
        ({"quantization": "int8", "gguf_model": "FILE"}, "gguf_model", "needs --quantization gguf"),
        (
            {"quantization": "gguf", "gguf_model": "a.gguf"},
            "gguf_model",
            "a.gguf is neither a local file nor a file on",
        ),
        ({"quantization": "gguf", "gguf_model": "org/name"}, "gguf_model", "org/name is neither a local file"),
        ({"quantization": "gguf", "gguf_model": "FILE", "ignored_layers": "a"}, "ignored_layers", "the file decides"),
        ({"quantization": "gguf", "gguf_model": "FILE,FILE,transformer=FILE"}, "", ""),
        ({"quantization": "gguf", "gguf_model": "org/name:q/x.gguf"}, "", ""),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_any_work(
    settings: dict[str, str], field: str, message: str, file: Path, tiny_qwen_image: Path
) -> None:
    given = {name: value.replace("FILE", str(file)) for name, value in settings.items()}
    config, checkpoint = EngineConfig.from_settings(model="x", **given), open_checkpoint(tiny_qwen_image)
    if not field:
        check_settings(config, checkpoint)
        return
    with pytest.raises(ConfigError, match=message) as caught:
        check_settings(config, checkpoint)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_the_weights_that_a_file_replaces_are_known_and_may_be_absent(
    file: Path, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_qwen_image, tmp_path / "c"))
    (folder / "transformer" / WEIGHT_FILE).unlink()
    config = EngineConfig.from_settings(model=str(folder), quantization="gguf", gguf_model=str(file))
    checkpoint = open_model(config.model, apply=lambda found: apply_settings(config, found))
    assert checkpoint.replaced == {"transformer"}
    assert load(folder, file).ready.found.quantized_layers
    plain = EngineConfig.from_settings(model=str(folder))
    assert apply_settings(plain, open_checkpoint(folder)).replaced == frozenset()


def test_of_two_denoisers_each_needs_a_file(tmp_path: Path, file: Path) -> None:
    config = EngineConfig.from_settings(model="x", quantization="gguf", gguf_model=str(file))
    with pytest.raises(ConfigError, match="--gguf-model transformer=FILE,transformer_2=FILE"):
        check_settings(config, open_checkpoint(build_wan_t2v(tmp_path / "c")))


# --- memory -----------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from torch import nn
from omni_grpc.config import QuantizationConfig
from omni_grpc.features import Context, gguf
from omni_grpc.loading.gguf import GgufFile
from omni_grpc.omni import Omni
from omni_grpc.nn.linear import Linear
from omni_grpc.types.spec import SingleFile, WeightMap
from tests.toy import toy_spec

def resident():
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) for line in status if line.startswith(("RssAnon", "RssFile"))) << 10

def watch():
    while not over.is_set():
        peaks.append(resident())
        time.sleep(0.001)

path, layers, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
x = torch.randn(8, width)
with torch.device("meta"):
    module = nn.ModuleList(Linear(width, width, False, stream="img") for _ in range(layers))
nn.functional.linear(x, torch.randn(width, width))
before, peaks, over = resident(), [], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
file, weights = GgufFile.open(path, SingleFile(architectures=("toy",)), "toy"), WeightMap()
context = Context(component="transformer", spec=toy_spec(), device=torch.device("cpu"), dtype=torch.float32,
                  places=file.places(module, weights))
gguf.apply(module, QuantizationConfig(quantization="gguf"), context)
file.load(module, weights, device=torch.device("cpu"), dtype=torch.float32, threads=4)
loaded = max(peaks) - before
with torch.inference_mode():
    for layer in module:
        x = layer(x)
over.set()
watcher.join()
print(loaded, max(peaks) - before, bool(x.isfinite().all()))
"""


def test_memory_stays_within_the_size_of_the_file(tmp_path: Path) -> None:
    layers, width = 160, 1024
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(0)) / 32
    tensors = {f"{number}.weight": weight for number in range(layers)}
    path = tmp_path / "m.gguf"
    data = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(path, "toy")
    for name in tensors:
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    command = [sys.executable, "-c", MEASURE, str(path), str(layers), str(width)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    loaded, ran, finite = done.stdout.split()
    size = path.stat().st_size
    assert finite == "True"
    assert 0.9 * size < int(loaded) < 1.15 * size
    assert int(ran) < 1.15 * size


def test_a_checkpoint_is_packed_into_a_file_that_it_loads_with(tiny_qwen_image: Path, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    count = pack(tiny_qwen_image, tmp_path / "p.gguf", kind)
    weights = safetensors.torch.load_file(tiny_qwen_image / "transformer" / WEIGHT_FILE)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "p.gguf").tensors}
    assert found.keys() == weights.keys()
    packed = [name for name, tensor in found.items() if tensor.tensor_type == kind]
    assert len(packed) == count > 0
    assert all("transformer_blocks." in name for name in packed)
    for name in packed:
        wanted = gguf.quants.dequantize(gguf.quants.quantize(weights[name].float().numpy(), kind), kind)
        assert np.array_equal(gguf.quants.dequantize(found[name].data, kind), wanted)
    with Omni(str(tiny_qwen_image), device="cpu", quantization="gguf", gguf_model=(str(tmp_path / "p.gguf"),)) as omni:
        result = omni.generate("a circle", width=32, height=32, steps=1)
    assert result.effective.quantized_layers == {"gguf Q8_0": result.effective.quantized_layers["gguf Q8_0"]}
