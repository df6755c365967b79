"""Adapters of kinds that cannot be added to outputs: each is what merging it into the weights is, in any batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni_grpc.features.lora.merged import VariantLinear
from omni_grpc.loading.checkpoint import WEIGHT_FILE, load_weights
from omni_grpc.types.lora import Lora
from tests.features.adapter_files import WRITERS, Source, Written
from tests.features.adapter_kinds import KINDS, ONLY, Kind
from tests.features.suite import FAMILIES, Suite, alone, denoisers, far, run, save
from tests.models.cases import ENTRIES
from tests.models.model import Model

TOLERANCE = 2e-5
"""How far latents in float32 may be from those with merged weights, of the largest of them."""


class Kinds:
    """A model with a file of each kind and one of LoRA, and another one whose weights are merged."""

    def __init__(self, entry: str, folder: Path) -> None:
        self.suite = Suite(ENTRIES[entry], folder)
        weights = self.suite.weights(self.suite.components[0])
        self.files: dict[str, Kind] = {}
        for name, writer in KINDS.items():
            if entry in ONLY.get(name, (entry,)):
                self.files[name] = writer(Source(entry, weights))
                save(self.files[name].tensors, folder / f"{name}.safetensors", self.files[name].header)
        self.lora: Written = WRITERS["peft"](Source(entry, weights))
        save(self.lora.tensors, folder / "lora.safetensors", self.lora.header)
        self.settings = {"lora": {name: str(folder / f"{name}.safetensors") for name in (*self.files, "lora")}}
        self.model = self.suite.load(**self.settings)
        self._merged = Model(self.suite.entry, self.suite.folder)

    def latents(self, model: Model, *loras: Lora) -> Tensor:
        return alone(model, model.request(model.draft(steps=2, loras=loras))).latents

    def merged(self, loras: Sequence[Lora], folder: Path) -> Model:
        """The model with the adapters merged into the weights of the checkpoint, one after the other, LoRA last."""
        for component, module in denoisers(self._merged).items():
            weights = self.suite.weights(component)
            for lora in sorted(loras, key=lambda lora: lora.lora_id == "lora"):
                if lora.lora_id != "lora":
                    weights = self.files[lora.lora_id].merge(weights, lora.scale)
                    continue
                for name, change in self.lora.added.items():
                    weights[name] = weights[name] + lora.scale * change.view_as(weights[name])
            save(weights, folder / WEIGHT_FILE)
            load_weights(module, folder, self._merged.spec.weights[component], device="cpu", dtype=torch.float32)
        return self._merged


ENTRIES_OF_KINDS = (*FAMILIES.values(), "HeliosPipeline")
PAIRS = [(entry, name) for entry in ENTRIES_OF_KINDS for name in KINDS if entry in ONLY.get(name, (entry,))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kinds]:
    """Each is made once."""
    return functools.cache(lambda entry: Kinds(entry, tmp_path_factory.mktemp(entry)))


@pytest.fixture
def kinds(entry: str, made: Callable[[str], Kinds]) -> Kinds:
    return made(entry)


def close(mine: Tensor, theirs: Tensor) -> bool:
    return far(mine, theirs) < TOLERANCE * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize(("entry", "name"), PAIRS)
def test_a_kind_is_what_merging_it_is_at_any_scale(name: str, kinds: Kinds, tmp_path: Path) -> None:
    plain = kinds.latents(kinds.model)
    for scale in (1.0, 0.6):
        loras = [Lora(lora_id=name, scale=scale)]
        got, expected = kinds.latents(kinds.model, *loras), kinds.latents(kinds.merged(loras, tmp_path))
        assert close(got, expected)
        assert far(expected, plain) > 1e-3, "it changes something"


@pytest.mark.parametrize(("entry", "name"), PAIRS)
def test_every_key_is_used(name: str, kinds: Kinds) -> None:
    adapter = next(adapter for adapter in kinds.model.ready.found.loras if adapter.id == name)
    assert adapter.skipped == {}
    assert adapter.keys_applied == len(kinds.files[name].tensors) * len(kinds.suite.components)


@pytest.mark.parametrize("entry", ENTRIES_OF_KINDS)
def test_at_scale_zero_no_kind_changes_a_bit(kinds: Kinds) -> None:
    plain = kinds.latents(kinds.suite.load())
    names = list(kinds.files)
    for part in (names[:8], names[8:]):
        assert torch.equal(kinds.latents(kinds.model, *(Lora(lora_id=name, scale=0.0) for name in part)), plain)


@pytest.mark.parametrize("entry", ENTRIES_OF_KINDS)
def test_several_of_them_are_merged_in_the_order_of_the_request_and_lora_is_added(kinds: Kinds, tmp_path: Path) -> None:
    for names in (("dora_peft", "lora"), ("glora", "oft_lycoris"), ("lora", "oft_peft", "dora_by_input", "norms")):
        loras = [Lora(lora_id=name, scale=0.7) for name in names]
        assert close(kinds.latents(kinds.model, *loras), kinds.latents(kinds.merged(loras, tmp_path)))


@pytest.mark.parametrize("entry", ENTRIES_OF_KINDS)
def test_rows_of_a_batch_have_kinds_of_their_own(kinds: Kinds) -> None:
    """Requests without adapters, with LoRA, with rescaled outputs, with merged weights, with norms: in one batch."""
    model = kinds.model
    asked = [(), ("lora",), ("dora_kohya",), ("glora",), ("glora",), ("norms",), ("oft_peft", "lora"), ()]
    requests = [
        model.request(model.draft(steps=2, wider=n % 2, loras=tuple(Lora(lora_id=name) for name in names)), f"job{n}")
        for n, names in enumerate(asked)
    ]
    together = run(model, *((0, request) for request in requests))
    for request in requests:
        assert close(together[request.id].latents, alone(model, request).latents)


def test_only_layers_that_need_it_have_copies(made: Callable[[str], Kinds]) -> None:
    model = made("QwenImagePipeline").model
    layers = [part for part in denoisers(model)["transformer"].modules() if isinstance(part, VariantLinear)]
    assert any("dora_peft" in layer.beside for layer in layers)
    assert not any("glora" in layer.beside or "dora_by_input" in layer.beside for layer in layers)
