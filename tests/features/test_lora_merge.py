"""`lora merge` and `extract`: a merged checkpoint is what adapters do row by row, and gives the adapter back."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.loading.adapters.extract import extract
from omni_grpc.loading.adapters.merge import MERGED, RECORD, Fold, Weights, merge
from omni_grpc.loading.checkpoint import INDEX_FILE, WEIGHT_FILE
from omni_grpc.types.errors import CheckpointError, ConfigError
from omni_grpc.types.lora import Lora
from tests.features.adapter_files import ONLY, WRITERS, Source, Written
from tests.features.suite import FAMILIES, FIRST, SECOND, Suite, alone, save
from tests.models.cases import ENTRIES
from tests.models.model import Model

TOLERANCE = 1 / 255
PAIRS = [
    (entry, name)
    for entry in (*FAMILIES.values(), "HeliosPipeline")
    for name in WRITERS
    if entry in ONLY.get(name, (entry,))
]


class Made:
    """A tiny checkpoint with a file of each layout for it."""

    def __init__(self, entry: str, folder: Path) -> None:
        self.entry, self.folder = ENTRIES[entry], folder
        self.checkpoint = self.entry.build(folder / "checkpoint")
        self.components = tuple(
            name for name in open_checkpoint(self.checkpoint).spec.weights if (self.checkpoint / name).is_dir()
        )
        self.files: dict[str, Written] = {}
        for name, writer in WRITERS.items():
            if entry in ONLY.get(name, (entry,)):
                self.files[name] = writer(Source(entry, weights(self.checkpoint / self.components[0])))
                save(self.files[name].tensors, self.path(name), self.files[name].header)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def weights(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / WEIGHT_FILE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Each is made once."""
    return functools.cache(lambda entry: Made(entry, tmp_path_factory.mktemp(entry)))


@pytest.mark.parametrize(("entry", "name"), PAIRS)
def test_every_layout_is_added_to_the_weights_that_it_changes_and_to_no_other(
    entry: str, name: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    it, out = made(entry), tmp_path / "merged"
    report = merge(open_checkpoint(it.checkpoint), [Fold(path=it.path(name), scale=0.7)], out)
    written = it.files[name]
    for component in it.components:
        before, after = weights(it.checkpoint / component), weights(out / component)
        added = written.added if component in (written.components or it.components) else {}
        assert list(before) == list(after)
        for key, tensor in before.items():
            assert after[key].dtype == tensor.dtype
            if key in added:
                wanted = tensor.float() + 0.7 * added[key].view_as(tensor)
                torch.testing.assert_close(after[key].float(), wanted, rtol=1e-5, atol=1e-5)
                assert not torch.equal(after[key], tensor)
            else:
                assert torch.equal(after[key], tensor)
        assert report["tensors"].get(component, 0) == len(added)
    assert report["merged"][0]["sha256"] == hashlib.sha256(it.path(name).read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Suite]:
    return functools.cache(lambda entry: Suite(ENTRIES[entry], tmp_path_factory.mktemp(entry)))


@pytest.mark.parametrize("entry", FAMILIES.values())
def test_a_merged_checkpoint_draws_what_adapters_do_row_by_row(
    entry: str, suite: Callable[[str], Suite], tmp_path: Path
) -> None:
    """Two at once, whose files have LoRA, LoKr, whole differences and biases."""
    it = suite(entry)
    model = it.load(it.lora)
    folds = [Fold(path=it.adapters[FIRST], scale=0.8), Fold(path=it.adapters[SECOND], scale=-0.5)]
    merge(open_checkpoint(it.folder), folds, tmp_path / "merged")
    merged = Model(it.entry, tmp_path / "merged")
    loras = (Lora(lora_id=FIRST, scale=0.8), Lora(lora_id=SECOND, scale=-0.5))
    wanted = alone(model, model.request(model.draft(steps=3, loras=loras))).latents
    got = alone(merged, merged.request(merged.draft(steps=3))).latents
    assert float((got - wanted).abs().max()) < TOLERANCE * max(1.0, float(wanted.abs().max()))
    plain = alone(model, model.request(model.draft(steps=3))).latents
    assert float((got - plain).abs().max()) > 10 * TOLERANCE


def low_rank(component: str = "transformer", *, alpha: float = 3.0) -> tuple[dict[str, Tensor], dict[str, str]]:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for number in (0, 1):
        layer = f"{component}.transformer_blocks.{number}.attn.to_q"
        tensors[f"{layer}.lora_A.weight"] = torch.randn(4, 128, generator=generator) / 12
        tensors[f"{layer}.lora_B.weight"] = torch.randn(128, 4, generator=generator) / 12
    return tensors, {"lora_adapter_metadata": json.dumps({f"{component}.lora_alpha": alpha})}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    tensors, header = low_rank()
    safetensors.torch.save_file(tensors, tmp_path / "style.safetensors", header)
    return tmp_path / "style.safetensors"


def sharded(folder: Path, target: Path) -> Path:
    """The checkpoint with its transformer in two shards, with an index, and with another variant beside it."""
    safetensors_file = folder / "transformer" / WEIGHT_FILE
    tensors = safetensors.torch.load_file(safetensors_file)
    for path in folder.rglob("*"):
        if path.is_file() and path != safetensors_file:
            (target / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(folder)).write_bytes(path.read_bytes())
    placed = {}
    for number in (0, 1):
        name = f"diffusion_pytorch_model-0000{number + 1}-of-00002.safetensors"
        part = dict(sorted(tensors.items())[number::2])
        placed |= dict.fromkeys(part, name)
        safetensors.torch.save_file(
            {key: x.bfloat16() for key, x in part.items()}, target / "transformer" / name, {"format": "pt", "own": "x"}
        )
    (target / "transformer" / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    safetensors.torch.save_file(tensors, target / "transformer" / "diffusion_pytorch_model.fp32.safetensors")
    return target


def test_shards_stay_shards_and_the_rest_is_copied_or_linked(
    tiny_qwen_image: Path, adapter: Path, tmp_path: Path
) -> None:
    source = sharded(tiny_qwen_image, tmp_path / "source")
    report = merge(open_checkpoint(source), [Fold(path=adapter, scale=0.5)], tmp_path / "out", link=True)
    stale = "transformer/diffusion_pytorch_model.fp32.safetensors"
    assert report["left_out"] == [stale], "it has the old weights"
    names = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()} == (
        names - {Path(stale)} | {Path(RECORD)}
    )
    tensors, _ = low_rank()
    for shard in sorted((tmp_path / "out/transformer").glob("*.safetensors")):
        with safetensors.safe_open(shard, framework="pt") as handle:
            after, metadata = {key: handle.get_tensor(key) for key in handle.keys()}, handle.metadata()  # noqa: SIM118
        before = safetensors.torch.load_file(source / "transformer" / shard.name)
        layers = [key for key in before if key.endswith("attn.to_q.weight")]
        assert metadata["own"] == "x"
        assert (MERGED in metadata) is bool(layers), "what does not change is the same file"
        for key, tensor in before.items():
            wanted = tensor
            if key in layers:
                name = f"transformer.{key.removesuffix('.weight')}"
                product = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
                wanted = (tensor.float() + 0.5 * 3 / 4 * product).bfloat16()
            assert after[key].dtype == torch.bfloat16
            torch.testing.assert_close(after[key], wanted, rtol=2**-8 if key in layers else 0, atol=1e-6)
    config = Path("transformer/config.json")
    assert (tmp_path / "out" / config).stat().st_ino == (source / config).stat().st_ino
    assert json.loads((tmp_path / "out" / RECORD).read_text()) == report


def test_memory_holds_one_tensor_of_the_checkpoint(
    made: Callable[[str], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, seen, most = Weights.read, [], 0

    def counted(weights: Weights, key: str) -> Tensor:
        nonlocal most
        tensor = read(weights, key)
        seen.append(weakref.ref(tensor))
        most = max(most, sum(one() is not None for one in seen))
        return tensor

    monkeypatch.setattr(Weights, "read", counted)
    it = made("QwenImagePipeline")
    report = merge(open_checkpoint(it.checkpoint), [Fold(path=it.path("peft"))], tmp_path / "out")
    assert len(seen) == report["tensors"]["transformer"] > 30
    assert most == 1


def test_another_component_may_be_quantized(tiny_qwen_image: Path, adapter: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_qwen_image, source)
    file = source / "text_encoder/model.safetensors"
    codes = {key: x.to(torch.float8_e4m3fn) for key, x in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(codes, file, {"format": "pt"})
    merge(open_checkpoint(source), [Fold(path=adapter)], tmp_path / "out")
    assert (tmp_path / "out/text_encoder/model.safetensors").read_bytes() == file.read_bytes()


def test_what_was_merged_before_stays_in_the_record(tiny_qwen_image: Path, adapter: Path, tmp_path: Path) -> None:
    merge(open_checkpoint(tiny_qwen_image), [Fold(path=adapter)], tmp_path / "one")
    merge(open_checkpoint(tmp_path / "one"), [Fold(path=adapter, scale=-1.0)], tmp_path / "two")
    with safetensors.safe_open(tmp_path / "two/transformer" / WEIGHT_FILE, framework="pt") as handle:
        merged = json.loads(handle.metadata()[MERGED])
    assert [one["scale"] for one in merged] == [1.0, -1.0]
    for key, tensor in weights(tiny_qwen_image / "transformer").items():
        torch.testing.assert_close(weights(tmp_path / "two/transformer")[key], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("bad", "message"), [
    (lambda it: it | {"transformer.proj_out.lora_A.weight": torch.ones(2, 3)}, "no product"),
    (lambda it: {key.replace("to_q", "to_x"): x for key, x in it.items()}, "no such layer in the model"),
    (lambda it: {key: x * math.nan for key, x in it.items()}, "not finite"),
])  # fmt: skip
def test_an_adapter_that_does_not_fit_leaves_nothing_behind(
    bad: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], message: str, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    tensors = bad(low_rank()[0] | {"transformer.proj_out.lora_B.weight": torch.ones(64, 1)})
    if message != "no product":
        del tensors["transformer.proj_out.lora_B.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(ConfigError, match=message):
        merge(open_checkpoint(tiny_qwen_image), [Fold(path=tmp_path / "bad.safetensors")], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.safetensors"]


def test_what_cannot_be_merged_is_refused_by_name(tiny_qwen_image: Path, adapter: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_qwen_image)
    with pytest.raises(ConfigError, match="scale 0 changes nothing"):
        merge(checkpoint, [Fold(path=adapter, scale=0.0)], tmp_path / "out")
    with pytest.raises(ConfigError, match="'transformer_2' is no component of the model"):
        merge(checkpoint, [Fold(path=adapter, component="transformer_2")], tmp_path / "out")
    with pytest.raises(CheckpointError, match="already exists"):
        merge(checkpoint, [Fold(path=adapter)], tmp_path)
    tensors, _ = low_rank()
    huge = {key: x.half() for key, x in tensors.items()}
    safetensors.torch.save_file(huge, tmp_path / "huge.safetensors")
    half = tmp_path / "half"
    merge(checkpoint, [Fold(path=adapter)], half)
    file = half / "transformer" / WEIGHT_FILE
    safetensors.torch.save_file({key: x.half() for key, x in safetensors.torch.load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match="not finite in F16"):
        merge(open_checkpoint(half), [Fold(path=tmp_path / "huge.safetensors", scale=1e9)], tmp_path / "out")
    codes = {key: x.to(torch.float8_e4m3fn) for key, x in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(codes, file)
    with pytest.raises(CheckpointError, match="is quantized") as caught:
        merge(open_checkpoint(half), [Fold(path=adapter)], tmp_path / "out")
    assert caught.value.reason == "QUANTIZATION_NOT_SUPPORTED"
    with pytest.raises(CheckpointError, match="is quantized"):
        extract(checkpoint, open_checkpoint(half), tmp_path / "found.safetensors", rank=4)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("entry", FAMILIES.values())
def test_what_is_extracted_from_a_merged_checkpoint_is_the_adapter(
    entry: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    """Of mixed ranks, and with --full differences of biases: merged again, it makes the same weights."""
    it = made(entry)
    base, merged = open_checkpoint(it.checkpoint), tmp_path / "merged"
    name = "lightx2v"
    merge(base, [Fold(path=it.path(name))], merged)
    report = extract(base, open_checkpoint(merged), tmp_path / "found.safetensors", energy=1.0, full=True)
    assert (report["left_out"], report["lost"]) == ({}, pytest.approx(0, abs=1e-9))
    again = tmp_path / "again"
    merge(base, [Fold(path=tmp_path / "found.safetensors")], again)
    for component in it.components:
        wanted, before = weights(merged / component), weights(it.checkpoint / component)
        for key, tensor in weights(again / component).items():
            far = float((tensor - wanted[key]).abs().max())
            assert far <= 1e-5 * max(1.0, float((wanted[key] - before[key]).abs().max())), key
    low = {layer: found["rank"] for layer, found in report["components"]["transformer"].items()}
    assert set(low.values()) >= {2, 8}, "the ranks of the file come back, and whole differences stay whole"


def test_ranks_and_energies_cut_and_are_told(tiny_qwen_image: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    layer = "transformer_blocks.0.attn.to_q"
    u, v = (torch.linalg.qr(torch.randn(128, 3, generator=generator))[0] for _ in range(2))
    values = torch.tensor([4.0, 2.0, 1.0])  # squares 16, 4, 1
    tensors = {
        f"{layer}.lora_A.weight": values[:, None] * v.T,
        f"{layer}.lora_B.weight": u.contiguous(),
        f"{layer}.diff_b": torch.full((128,), 0.5),
    }
    safetensors.torch.save_file(tensors, tmp_path / "known.safetensors")
    base = open_checkpoint(tiny_qwen_image)
    merge(base, [Fold(path=tmp_path / "known.safetensors")], tmp_path / "tuned")
    tuned = open_checkpoint(tmp_path / "tuned")
    for options, rank in (
        ({"rank": 2}, 2),
        ({"energy": 0.9}, 2),
        ({"energy": 0.96}, 3),
        ({"energy": 0.99, "rank": 1}, 1),
    ):
        file = tmp_path / f"{rank}-{len(list(tmp_path.iterdir()))}.safetensors"
        report = extract(base, tuned, file, **options)
        found = report["components"]["transformer"][layer]
        left = {1: 5 / 21, 2: 1 / 21, 3: 0.0}[rank]
        assert (found["rank"], found["lost"]) == (rank, pytest.approx(left, abs=1e-5))
        bias = 128 * 0.25
        assert report["lost"] == pytest.approx((left * 21 + bias) / (21 + bias), abs=1e-5)
        assert report["left_out"] == {
            f"transformer.{layer}.bias": "no linear layer; --full keeps biases, norms and tables of modulation"
        }
        with safetensors.safe_open(file, framework="pt") as handle:
            config = json.loads(handle.metadata()["lora_adapter_metadata"])
            product = handle.get_tensor(f"transformer.{layer}.lora_B.weight") @ handle.get_tensor(
                f"transformer.{layer}.lora_A.weight"
            )
        assert (config["transformer.r"], config["transformer.lora_alpha"]) == (rank, rank)
        torch.testing.assert_close(product, (u[:, :rank] * values[:rank]) @ v.T[:rank], rtol=0, atol=1e-5)


def test_with_full_norms_and_tables_come_back_and_what_has_no_form_is_told(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    source, tuned = made("WanPipeline").checkpoint, tmp_path / "tuned"
    shutil.copytree(source, tuned)
    changed = ("blocks.0.attn1.norm_q.weight", "blocks.0.scale_shift_table", "scale_shift_table", "blocks.0.norm2.bias")
    before = weights(source / "transformer")
    after = before | {key: before[key] + 0.25 for key in changed}
    save(after, tuned / "transformer" / WEIGHT_FILE)
    vae = next((tuned / "vae").glob("*.safetensors"))
    tensors = safetensors.torch.load_file(vae)
    save({key: x + 1 for key, x in tensors.items()}, vae)
    base = open_checkpoint(source)
    report = extract(base, open_checkpoint(tuned), tmp_path / "found.safetensors", rank=4, full=True)
    assert report["left_out"] == {"vae": "adapters do not change this component"}
    assert (report["layers"], report["lost"]) == (0, 0.0)
    merge(base, [Fold(path=tmp_path / "found.safetensors")], tmp_path / "again")
    for key, tensor in weights(tmp_path / "again/transformer").items():
        torch.testing.assert_close(tensor, after[key], rtol=0, atol=1e-6)


def test_what_is_no_difference_of_one_model_is_refused(
    tiny_qwen_image: Path, adapter: Path, made: Callable[[str], Made], tmp_path: Path
) -> None:
    base, file = open_checkpoint(tiny_qwen_image), tmp_path / "found.safetensors"
    with pytest.raises(CheckpointError, match="no difference to extract"):
        extract(base, base, file, rank=4)
    with pytest.raises(
        CheckpointError, match="not the same model: one is a QwenImagePipeline, the other a WanPipeline"
    ):
        extract(base, open_checkpoint(made("WanPipeline").checkpoint), file, rank=4)
    merge(base, [Fold(path=adapter)], tmp_path / "other")
    path = tmp_path / "other/transformer" / WEIGHT_FILE
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors | {"img_in.weight": torch.zeros(128, 32)}, path)
    with pytest.raises(CheckpointError, match=r"transformer img_in.weight is \(128, 64\) and \(128, 32\)"):
        extract(base, open_checkpoint(tmp_path / "other"), file, rank=4)
    for options, field in (({}, "rank"), ({"rank": 0}, "rank"), ({"energy": 1.5}, "energy")):
        with pytest.raises(ConfigError) as caught:
            extract(base, base, file, **options)
        assert caught.value.violations[0].field == field
    assert not file.exists()
    file.touch()
    with pytest.raises(ConfigError, match="already exists"):
        extract(base, base, file, rank=4)
