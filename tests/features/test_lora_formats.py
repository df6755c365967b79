"""Files of adapters in the layouts of many tools, on every family: each is what merging it into the weights is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from omni_grpc.features.lora import LoraLinear
from omni_grpc.loading.checkpoint import WEIGHT_FILE, load_weights
from omni_grpc.nn.updates import LowRankUpdate
from omni_grpc.types.lora import Lora
from tests.features.adapter_files import ONLY, WRITERS, Source, Written
from tests.features.suite import FAMILIES, Run, Suite, alone, denoisers, far, run, save
from tests.models.cases import ENTRIES
from tests.models.model import Model

TOLERANCE = 1e-5
"""How far latents in float32 may be from those with merged weights."""

LABELS = {
    "peft": "peft",
    "diffusers": "peft",
    "kohya": "kohya",
    "block_diagonal": "kohya",
    "onetrainer": "onetrainer",
    "musubi": "musubi",
    "comfyui": "comfyui",
    "unprefixed": "diffusers",
    "lightx2v": "lightx2v",
    "biased": "peft",
    "loha": "lycoris",
    "lokr": "kohya",
    "xlabs": "xlabs",
    "with_copies": "comfyui",
    "second_expert": "peft",
}
"""What a file's layout is called in replies."""


class Formats:
    """A model with a file of each layout, and another one whose weights are merged with one file after the other."""

    def __init__(self, entry: str, folder: Path) -> None:
        self.suite = Suite(ENTRIES[entry], folder)
        self.files: dict[str, Written] = {}
        weights = self.suite.weights(self.suite.components[0])
        for name, writer in WRITERS.items():
            if entry in ONLY.get(name, (entry,)):
                self.files[name] = writer(Source(entry, weights))
                save(self.files[name].tensors, folder / f"{name}.safetensors", self.files[name].header)
        self.model = self.suite.load(lora={name: str(folder / f"{name}.safetensors") for name in self.files})
        self._merged = Model(self.suite.entry, self.suite.folder)

    def run(self, model: Model, *loras: Lora) -> Run:
        return alone(model, model.request(model.draft(steps=2, loras=loras)))

    def merged(self, name: str, scale: float, folder: Path) -> Model:
        """The model with the weights of the checkpoint plus `scale` times what a file adds."""
        written = self.files[name]
        for component, module in denoisers(self._merged).items():
            weights = self.suite.weights(component)
            if component in (written.components or self.suite.components):
                for key, change in written.added.items():
                    weights[key] = weights[key] + scale * change.view_as(weights[key])
            save(weights, folder / WEIGHT_FILE)
            load_weights(module, folder, self._merged.spec.weights[component], device="cpu", dtype=torch.float32)
        return self._merged


PAIRS = [
    (entry, name)
    for entry in (*FAMILIES.values(), "HeliosPipeline")
    for name in WRITERS
    if entry in ONLY.get(name, (entry,))
]
"""An entry, and a layout that files for it may have."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Formats]:
    """Each is made once."""
    return functools.cache(lambda entry: Formats(entry, tmp_path_factory.mktemp(entry)))


@pytest.fixture
def formats(entry: str, made: Callable[[str], Formats]) -> Formats:
    return made(entry)


@pytest.mark.parametrize(("entry", "name"), PAIRS)
def test_a_file_is_what_merging_it_is(name: str, formats: Formats, tmp_path: Path) -> None:
    got = formats.run(formats.model, Lora(lora_id=name, scale=0.7)).latents
    expected = formats.run(formats.merged(name, 0.7, tmp_path)).latents
    assert far(got, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))
    assert far(expected, formats.run(formats.model).latents) > 1e-3, "it changes something"


@pytest.mark.parametrize(("entry", "name"), PAIRS)
def test_a_file_is_told_with_its_layout_and_what_becomes_of_each_key(name: str, formats: Formats) -> None:
    adapter = next(adapter for adapter in formats.model.ready.found.loras if adapter.id == name)
    written = formats.files[name]
    assert adapter.format == LABELS[name]
    assert adapter.targets == (written.components or formats.suite.components)
    expected: dict[str, str] = {}
    for key, tensor in written.tensors.items():
        if key.startswith("lora_te1_"):
            expected[key] = "text encoder"
        elif not tensor.any():
            expected[key] = "zero"
        elif name == "with_copies" and ("qkv" in key or "linear1" in key):
            expected[key] = "a copy of what the file has for the parts of this layer"
    assert adapter.skipped == expected
    assert set(adapter.applied.values()) <= {0, len(written.tensors) - len(expected)}


@pytest.mark.parametrize("entry", dict(PAIRS))
def test_at_scale_zero_no_file_changes_a_bit(formats: Formats) -> None:
    plain = formats.run(formats.suite.load()).latents
    names = list(formats.files)
    for part in (names[:8], names[8:]):
        zero = formats.run(formats.model, *(Lora(lora_id=name, scale=0.0) for name in part)).latents
        assert torch.equal(zero, plain)


@pytest.mark.parametrize("entry", dict(PAIRS))
def test_rows_of_a_batch_have_changes_of_different_kinds(formats: Formats) -> None:
    """Requests of other sizes with other adapters, or several, in one batch: each is what it is alone."""
    model = formats.model
    loras = [(), ("lokr",), ("lightx2v", "loha"), ("biased",), ("lokr", "kohya")]
    requests = [
        model.request(model.draft(steps=2, wider=n % 2, loras=tuple(Lora(lora_id=name) for name in names)), f"job{n}")
        for n, names in enumerate(loras)
    ]
    together = run(model, *((0, request) for request in requests))
    for request in requests:
        expected = alone(model, request).latents
        assert far(together[request.id].latents, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))


def test_a_fused_layer_costs_no_more_than_its_parts(made: Callable[[str], Formats]) -> None:
    """Parts with factors in common are one product; parts without are three, each of its own rank alone."""
    model = made("FluxPipeline-schnell").model
    layer = denoisers(model)["transformer"].get_submodule("stack.dual.0.attn.to_qkv")
    assert isinstance(layer, LoraLinear)
    shared, apart, kron = (layer.parts[name] for name in ("comfyui", "block_diagonal", "lokr"))
    assert [(type(part).__name__, part.rows) for part in (*shared, *kron)] == [
        ("LowRankUpdate", slice(0, 192)),
        ("KronUpdate", slice(0, 192)),
    ]
    assert [part.rows for part in apart] == [slice(0, 64), slice(64, 128), slice(128, 192)]
    assert [part.down.shape for part in apart if isinstance(part, LowRankUpdate)] == [(4, 64)] * 3
