"""`doctor --advise`: checkpoints of real sizes, of which only the headers are there, on machines that are made up."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from omni_grpc.checkpoint.registry import open_model
from omni_grpc.checkpoint.sizes import header, headers, parts
from omni_grpc.cli import doctor
from omni_grpc.cli.advise import Advice, Case, Gpu, Host, advise, render
from omni_grpc.config import EngineConfig
from omni_grpc.config.settings import settings
from omni_grpc.resolve.memory_hints import REMEDIES, Switch
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.errors import CheckpointError
from tools.tiny_checkpoints import BUILDERS

BILLION = 10**9


def write(path: Path, tensors: Mapping[str, int], dtype: str = "BF16") -> None:
    """A safetensors file that ends with its header."""
    text = json.dumps(
        {name: {"dtype": dtype, "shape": [size], "data_offsets": [0, 0]} for name, size in tensors.items()}
    )
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())


def blocks(name: str, count: int, each: int, rest: int) -> dict[str, int]:
    return {f"{name}.{number}.attn.to_q.weight": each for number in range(count)} | {"proj_out.weight": rest}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory, tiny_qwen_image: Path) -> str:
    """Qwen-Image: a transformer of 20.4 billion parameters in 60 blocks, a text encoder of 8.3 billion, a VAE."""
    folder = tmp_path_factory.mktemp("advise") / "qwen"
    shutil.copytree(tiny_qwen_image, folder)
    file = "diffusion_pytorch_model.safetensors"
    write(folder / "transformer" / file, blocks("transformer_blocks", 60, 339 * 10**6, 60 * 10**6))
    write(folder / "text_encoder" / "model.safetensors", blocks("model.layers", 28, 250 * 10**6, 13 * 10**8))
    write(folder / "vae" / file, {"decoder.conv_out.weight": 127 * 10**6}, "F32")
    return str(folder)


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(BUILDERS["flux_schnell"](tmp_path_factory.mktemp("advise") / "schnell"))


def machine(cards: int, gib: int, memory: int) -> Host:
    return Host(gpus=(Gpu("card", gib << 30),) * cards, memory=memory << 30, cores=16)


def told(model: str, host: Host, **more: Any) -> Advice:
    return doctor.advice(EngineConfig.from_settings(model=model, **more), host)


def taken(advice: Advice) -> None:
    """Every command starts a server: its flags are known, and the model takes them."""
    for command in advice.commands:
        words = [word for word in shlex.split(command) if not word.startswith("CUDA_VISIBLE_DEVICES=")]
        assert words[:3] == ["python", "-m", "omni_grpc.serve"]
        config = settings(words[3:], {}, prog="serve", description="")
        open_model(config.model, apply=lambda found, config=config: apply_settings(config, found))


LAYERWISE, INT8 = "--enable-layerwise-offload", "--quantization int8"


@pytest.mark.parametrize(
    ("host", "flags"),
    [
        (machine(0, 0, 256), []),
        (machine(0, 0, 64), [INT8]),
        (machine(1, 24, 128), [LAYERWISE]),
        (machine(1, 24, 32), [LAYERWISE, INT8]),
        (machine(1, 48, 128), [LAYERWISE]),
        (machine(1, 48, 16), [INT8]),
        (machine(1, 80, 16), []),
        (machine(8, 80, 1024), []),
    ],
    ids=lambda value: f"{len(value.gpus)} cards, {value.memory >> 30} GiB" if isinstance(value, Host) else "",
)
def test_what_fits_and_with_which_flags(qwen: str, host: Host, flags: list[str]) -> None:
    advice = told(qwen, host)
    assert (advice.fits, [reason.flag for reason in advice.flags]) == (True, flags)
    assert [reason.lossless for reason in advice.flags] == [flag == LAYERWISE for flag in flags]
    assert all(reason.why for reason in (*advice.flags, *advice.also))
    assert advice.need.device <= 0.95 * max((gpu.memory for gpu in host.gpus), default=0)
    assert advice.need.host <= 0.95 * host.memory
    taken(advice)


def test_needs_are_the_bytes_of_the_weights_and_an_estimate(qwen: str) -> None:
    work = (2 << 30) + 1024 * 1024 * 1024
    plain, offloaded = told(qwen, machine(1, 80, 64)), told(qwen, machine(1, 24, 128))
    block, all_blocks, transformer = 339 * 10**6, 60 * 339 * 10**6, 60 * 340 * 10**6
    others = 28 * 250 * 10**6 + 13 * 10**8 + 127 * 10**6
    assert {part.name: part.parameters for part in plain.parts} == {
        "transformer": transformer,
        "text_encoder": 83 * 10**8,
        "vae": 127 * 10**6,
    }
    assert (plain.need.device, plain.need.host) == (2 * (transformer + others) + work, 0)
    resting = 2 * (all_blocks - 2 * block)
    assert offloaded.need.device == pytest.approx(plain.need.device - resting, rel=1e-6)
    assert offloaded.need.host == pytest.approx(resting, rel=1e-6)
    assert told(qwen, machine(0, 0, 256)).need.host == 4 * (transformer + others) + work


def test_a_model_that_does_not_fit_is_told_with_what_lacks(qwen: str) -> None:
    advice = told(qwen, machine(1, 16, 256))
    assert (advice.fits, advice.commands, advice.flags, advice.also) == (False, (), (), ())
    assert "it needs 19.8 GB on the device, which has 17.2 GB" in advice.lacking
    assert f"It does not fit: {advice.lacking}." in render(advice)


def test_several_cards_get_a_server_each_as_far_as_memory_goes(qwen: str) -> None:
    advice = told(qwen, machine(8, 80, 1024))
    assert len(advice.commands) == 8
    assert advice.commands[3].startswith("CUDA_VISIBLE_DEVICES=3 python -m omni_grpc.serve --model ")
    assert advice.commands[3].endswith(" --port 50054")
    few = told(qwen, machine(8, 24, 192))
    assert (len(few.commands), few.notes[1]) == (4, "a server uses one device; 4 of 8 devices stay idle")


def test_diffusers_offloads_the_blocks_of_all_components(qwen: str) -> None:
    advice = told(qwen, machine(1, 48, 256), diffusion_load_format="diffusers")
    assert (advice.native, [reason.flag for reason in advice.flags]) == (False, ["--enable-layerwise-offload"])
    assert advice.also == ()
    taken(advice)
    assert advice.need.device < told(qwen, machine(1, 48, 256)).need.device, "a native model has its text encoder there"
    whole = told(qwen, machine(1, 80, 256), diffusion_load_format="diffusers")
    config = EngineConfig.from_settings(model=qwen, diffusion_load_format="diffusers", enable_cpu_offload=True)
    checkpoint = open_model(config.model, apply=lambda found: found)
    component = Case(checkpoint, whole.parts, whole.host).need(config)
    work = whole.need.device - 2 * sum(part.parameters for part in whole.parts)
    assert component.device == 2 * whole.parts[0].parameters + work
    assert component.host == 2 * sum(part.parameters for part in whole.parts)


def test_the_denoiser_of_a_native_model_stays_and_one_other_component_comes_at_a_time(qwen: str) -> None:
    plain = told(qwen, machine(1, 80, 256))
    config = EngineConfig.from_settings(model=qwen, enable_cpu_offload=True)
    checkpoint = open_model(config.model, apply=lambda found: found)
    need = Case(checkpoint, plain.parts, plain.host).need(config)
    # the VAE is the smallest
    assert plain.need.device - need.device == need.host == 2 * plain.parts[-1].parameters


def test_what_costs_quality_comes_last_and_only_where_it_can_help(qwen: str, schnell: str) -> None:
    also = told(qwen, machine(1, 80, 64)).also
    assert [(reason.flag, reason.lossless) for reason in also] == [("--cache-backend tea_cache", False), (INT8, False)]
    assert [reason.flag for reason in told(schnell, machine(1, 80, 64)).also] == [INT8], "it has four steps"


def test_what_is_printed(qwen: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "host", lambda: machine(1, 24, 128))
    assert doctor.main(["--advise", qwen]) == 0
    said = capsys.readouterr().out
    assert "transformer 40.8 GB, text_encoder 16.6 GB, vae 254 MB: 57.7 GB in bfloat16" in said
    assert f"  python -m omni_grpc.serve --model {qwen} --enable-layerwise-offload\n" in said
    assert "  --enable-layerwise-offload  lossless: two blocks of the denoiser" in said
    assert said.index("lossless") < said.index("lossy")
    assert doctor.main(["--advise", qwen, "--gpus", "8x16", "--memory", "256", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["fits"], len(record["host"]["gpus"]), record["host"]["memory"]) == (False, 8, 256 << 30)
    assert doctor.main(["--advise", qwen, "--gpus", "many"]) == 1
    assert "expected NUMBERxGIB" in capsys.readouterr().err
    assert doctor.main(["--advise", qwen + "/nowhere"]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_this_machine_is_read() -> None:
    here = doctor.host()
    assert here.cores >= 1
    assert here.memory > 1 << 30


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0not json", b"\xff" * 16])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("model", ["wan_t2v", "z_image"])
def test_sizes_are_those_of_the_weights(model: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = BUILDERS[model](tmp_path / model)
    config = EngineConfig.from_settings(model=str(folder))
    checkpoint = open_model(config.model, apply=lambda found: found)
    for part in parts(checkpoint, headers(folder)):
        (file,) = (folder / part.name).glob("*.safetensors")
        with safe_open(file, "pt") as tensors:
            sizes = [tensors.get_tensor(name) for name in tensors.keys()]  # noqa: SIM118 - it is no mapping
        assert part.parameters == sum(tensor.numel() for tensor in sizes)
        assert part.stored_bytes == sum(tensor.numel() * tensor.element_size() for tensor in sizes)
        assert part.denoiser == part.name.startswith("transformer")
        assert 0 <= part.largest_block <= part.in_blocks <= part.parameters
        assert not part.denoiser or part.in_blocks > part.parameters / 2


def test_what_is_stored_in_8_bits_counts_so_and_no_other_scheme_is_named(qwen: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen, tmp_path / "coded"))
    write(
        folder / "transformer" / "diffusion_pytorch_model.safetensors",
        blocks("transformer_blocks", 60, 339 * 10**6, 60 * 10**6),
        "F8_E4M3",
    )
    plain, coded = (told(model, machine(1, 80, 64)) for model in (qwen, str(folder)))
    assert plain.need.device - coded.need.device == 60 * 339 * 10**6
    assert INT8 in [reason.flag for reason in plain.also]
    assert INT8 not in [reason.flag for reason in coded.also]


def test_what_is_on_stays_on(qwen: str) -> None:
    config = EngineConfig.from_settings(model=qwen, quantization="int8")
    checkpoint = open_model(config.model, apply=lambda found: apply_settings(config, found))
    advice = advise(checkpoint, parts(checkpoint, headers(Path(qwen))), machine(1, 48, 64), config)
    assert (advice.fits, advice.flags) == (True, ())
    assert dataclasses.astuple(advice.need)[0] < 48 << 30


def test_two_settings_that_change_nothing_go_before_one_that_does(qwen: str) -> None:
    config = EngineConfig.from_settings(model=qwen)
    checkpoint = open_model(config.model, apply=lambda found: found)
    case = Case(checkpoint, tuple(parts(checkpoint, headers(Path(qwen)))), machine(1, 80, 64))
    lossless, lossy = ([Switch(it, True, "") for it in REMEDIES if it.lossless is kind][:2] for kind in (True, False))
    ranks = [case.rank(config, some) for some in ([], lossless[:1], lossless, lossy[:1], lossy)]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == 5
