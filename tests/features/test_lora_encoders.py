"""Adapters of text encoders, on every family: each is what merging it into the encoder's weights is."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omni_grpc.features.lora import LoraLinear
from omni_grpc.loading.adapters.encoder_names import _bare
from omni_grpc.loading.adapters.inspect import _encoder_layers, inspect
from omni_grpc.pipeline.state import COND
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.lora import Adapter, Lora
from omni_grpc.types.plan import LoadAdapter
from tests.features.suite import Suite, alone, cosine, far, run, save
from tests.models.cases import ENTRIES
from tests.models.model import Model, Result

TOLERANCE = 1e-5
"""How far latents in float32 may be from those with merged weights."""

CLIP, T5, QWEN, QWEN3, UMT5 = "CLIP", "T5", "Qwen2.5-VL", "Qwen3", "UMT5"
ENCODERS: Mapping[str, Mapping[str, str]] = {
    "FluxPipeline-schnell": {"text_encoder": CLIP, "text_encoder_2": T5},
    "QwenImagePipeline": {"text_encoder": QWEN},
    "ZImagePipeline": {"text_encoder": QWEN3},
    "WanPipeline": {"text_encoder": UMT5},
    "HeliosPipeline": {"text_encoder": UMT5},
}
PUBLISHED = {CLIP: "text_model.", T5: "", QWEN: "model.language_model.", QWEN3: "model.", UMT5: ""}
"""What is before the names of the layers where the model is whole."""


def peft(component: str, kind: str, path: str) -> str:
    return f"base_model.model.{component}.{PUBLISHED[kind]}{path}"


def diffusers(component: str, kind: str, path: str) -> str:
    return f"{component}.{path}"


def kohya(component: str, kind: str, path: str) -> str:
    mark = {CLIP: "lora_te1_", T5: "lora_te3_"}.get(kind, "lora_te_")
    return mark + (PUBLISHED[kind] + path).replace(".", "_")


def onetrainer(component: str, kind: str, path: str) -> str:
    mark = {CLIP: "lora_te1_", T5: "lora_te2_"}.get(kind, "lora_te_")
    return mark + (PUBLISHED[kind] + path).replace(".", "_")


def comfyui(component: str, kind: str, path: str) -> str:
    mark = {CLIP: "clip_l", T5: "t5xxl", QWEN: "qwen25_7b", QWEN3: "qwen3_4b", UMT5: "umt5xxl"}[kind]
    return f"text_encoders.{mark}.transformer.{PUBLISHED[kind].replace('language_model.', '')}{path}"


LAYOUTS: Mapping[str, Callable[[str, str, str], str]] = {
    layout.__name__: layout for layout in (peft, diffusers, kohya, onetrainer, comfyui)
}


@dataclasses.dataclass
class Adapted:
    """A model with a file for its encoders in each layout, and by component and module what each adds."""

    suite: Suite
    model: Model
    changes: dict[str, dict[str, dict[str, Tensor]]]
    files: dict[str, dict[str, Tensor]]

    def request(self, *loras: Lora, id: str = "job", **more: Any) -> Any:
        return self.model.request(self.model.draft(steps=2, loras=loras, **more), id)

    def merged(self, scales: Mapping[tuple[str, str], float]) -> Model:
        """Without the feature: the weights of the encoders plus scale times what an adapter adds to a component."""
        plain = Model(self.suite.entry, self.suite.folder)
        for (name, component), scale in scales.items():
            for path, change in self.changes[name].get(component, {}).items():
                module_path, _, leaf = path.rpartition(".")
                tensor = getattr(language_model(plain, component).get_submodule(module_path), leaf)
                tensor.data = tensor.data + scale * change
        return plain

    def result(self, model: Model, *loras: Lora) -> Result:
        return model.run_requests(model.request(model.draft(steps=2, loras=loras)))[0]


def language_model(model: Model, component: str) -> nn.Module:
    encoder: nn.Module = getattr(model.pipeline, component).encoder
    return encoder


def written(model: Model, entry: str, layout: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """A file for all layers of all encoders, whose kinds of change take turns, and what it adds."""
    generator = torch.Generator().manual_seed(len(layout))
    tensors: dict[str, Tensor] = {}
    changes: dict[str, dict[str, Tensor]] = {}
    for component, kind in ENCODERS[entry].items():
        added = changes.setdefault(component, {})
        linears = [(path, part) for path, part in language_model(model, component).named_modules()]
        for number, (path, part) in enumerate((path, part) for path, part in linears if isinstance(part, nn.Linear)):
            name, (out, inside) = LAYOUTS[layout](component, kind, path), part.weight.shape
            size = float(part.weight.std())
            down = torch.randn(3, inside, generator=generator) * size
            up = torch.randn(out, 3, generator=generator)
            if number % 4 == 1:
                first, second = torch.randn(2, 2, generator=generator), torch.randn(out // 2, inside // 2) * size
                tensors |= {f"{name}.lokr_w1": first, f"{name}.lokr_w2": second}
                added[f"{path}.weight"] = torch.kron(first, second)
            elif number % 4 == 3 and part.bias is not None:
                tensors |= {f"{name}.diff_b": up[:, 0].contiguous(), f"{name}.diff": (up @ down).contiguous()}
                added |= {f"{path}.bias": up[:, 0], f"{path}.weight": up @ down}
            else:
                tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
                tensors[f"{name}.alpha"] = torch.tensor(2.0)
                added[f"{path}.weight"] = 2 / 3 * up @ down
    return tensors, changes


def adapted(entry: str, folder: Path) -> Adapted:
    suite = Suite(ENTRIES[entry], folder)
    files, changes = {}, {}
    for layout in LAYOUTS:
        files[layout], changes[layout] = written(suite.load(), entry, layout)
        save(files[layout], folder / f"{layout}.safetensors")
    model = suite.load(lora={layout: str(folder / f"{layout}.safetensors") for layout in LAYOUTS})
    return Adapted(suite, model, changes, files)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    """Each is made once."""
    return functools.cache(lambda entry: adapted(entry, tmp_path_factory.mktemp(entry)))


@pytest.fixture(params=ENCODERS)
def it(request: pytest.FixtureRequest, made: Callable[[str], Adapted]) -> Adapted:
    return made(request.param)


def same(got: Result, expected: Result) -> None:
    latents, pixels = got.differs_from(expected)
    assert latents < TOLERANCE * max(1.0, float(expected.latents.abs().max()))
    assert pixels <= 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adapter_of_encoders_is_what_merging_it_is(layout: str, it: Adapted) -> None:
    components = language_models(it)
    expected = it.result(it.merged(dict.fromkeys(((layout, component) for component in components), 0.7)))
    same(it.result(it.model, Lora(lora_id=layout, scale=0.7)), expected)
    assert far(expected.latents, it.result(it.model).latents) > 1e-3, "it changes something"


def language_models(it: Adapted) -> tuple[str, ...]:
    return tuple(it.changes["peft"])


def test_every_key_is_told_with_its_component(it: Adapted) -> None:
    for adapter in it.model.ready.found.loras:
        assert adapter.skipped == {}
        assert adapter.targets == language_models(it)
        assert adapter.keys_applied == len(it.files[adapter.id])


def test_each_component_has_a_scale_of_its_own(it: Adapted) -> None:
    scales = {component: 0.5 + number for number, component in enumerate(language_models(it))}
    loras = [Lora(lora_id="kohya", scale=scale, target=component) for component, scale in scales.items()]
    expected = it.result(it.merged({("kohya", component): scale for component, scale in scales.items()}))
    same(it.result(it.model, *loras), expected)
    with pytest.raises(InvalidArgument, match="is not a component that 'kohya' changes; it changes text_encoder"):
        it.request(Lora(lora_id="kohya", target="text_encoder_9"))


def test_at_scale_zero_no_bit_changes(it: Adapted) -> None:
    plain, zero = Model(it.suite.entry, it.suite.folder), [Lora(lora_id=layout, scale=0.0) for layout in LAYOUTS]
    expected = it.result(plain).latents
    assert torch.equal(it.result(it.model).latents, expected)
    assert torch.equal(it.result(it.model, *zero).latents, expected)


def test_requests_of_a_batch_are_each_what_they_are_alone(it: Adapted) -> None:
    """The same prompt, size and timesteps: only the adapters, or a scale, differ."""
    cases = [
        (),
        (Lora(lora_id="peft"),),
        (Lora(lora_id="peft", scale=0.5),),
        (Lora(lora_id="kohya"), Lora(lora_id="comfyui", scale=-0.5)),
        (Lora(lora_id="peft", target=language_models(it)[-1]),),
    ]
    requests = [it.request(*loras, id=f"job{number}") for number, loras in enumerate(cases)]
    together = run(it.model, *((0, request) for request in requests))
    seen = []
    for request in requests:
        expected = alone(it.model, request).latents
        assert far(together[request.id].latents, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))
        seen.append(expected)
    distinct = seen if len(language_models(it)) > 1 else seen[:-1]
    assert all(far(one, other) > 1e-4 for one, other in itertools.combinations(distinct, 2))


def test_inspect_finds_the_layers_that_the_model_has(it: Adapted) -> None:
    """Without the modules: from the headers of the files alone."""
    for layout, tensors in it.files.items():
        report = inspect(it.suite.folder.parent / f"{layout}.safetensors", it.model.checkpoint)
        model = report["model"]
        assert (model["skipped"], model["refused"], model["works"]) == ({}, {}, True)
        applied = {component: one["keys"] for component, one in model["applied"].items() if one["keys"]}
        assert applied == {k: v for k, v in told(it, layout).applied.items() if v}
        assert sum(applied.values()) == len(tensors)
        named = set(report["components"])
        assert named == (set(language_models(it)) if layout in ("peft", "diffusers") else {"text encoder"})
    for component in language_models(it):
        theirs = _encoder_layers(it.suite.folder / component)
        ours = [
            name for name, part in language_model(it.suite.load(), component).named_modules() if type(part) is nn.Linear
        ]
        assert {_bare(name) for name, shape in theirs.items() if shape is not None} == set(map(_bare, ours))


def told(it: Adapted, name: str) -> Adapter:
    return next(adapter for adapter in it.model.ready.found.loras if adapter.id == name)


def test_an_adapter_that_is_loaded_later_has_text_encoders_too(it: Adapted) -> None:
    """Also one that came under the same name from another file: prompts are encoded with the load that was meant."""
    model = Model(it.suite.entry, it.suite.folder, lora_device_cache=1 << 30)
    adapters = model.residency.adapters
    assert adapters is not None
    seen = []
    for layout in ("peft", "kohya"):
        path = str(it.suite.folder.parent / f"{layout}.safetensors")
        entry = adapters.load(LoadAdapter(id="words", uid=f"words {layout}", path=path))
        assert adapters.attach(entry).targets == language_models(it)
        loras = (Lora(lora_id="words", uid=f"words {layout}", scale=0.7),)
        request = dataclasses.replace(model.request(model.draft(steps=2), layout), loras=loras)
        adapters.admit(request)
        seen.append(model.run_requests(request)[0])
        same(seen[-1], it.result(it.model, Lora(lora_id=layout, scale=0.7)))
    assert far(seen[0].latents, seen[1].latents) > 1e-3
    for layout in ("peft", "kohya"):
        (left,) = adapters.release(layout) or [adapters.unload(f"words {layout}")]
        adapters.remove(left)
    plain = model.run_requests(model.request(model.draft(steps=2)))[0]
    assert torch.equal(plain.latents, it.result(it.model).latents)
    assert not [part for part in model.pipeline.modules() if isinstance(part, LoraLinear)]


def test_adapters_are_in_the_precision_of_the_layers_of_an_encoder(it: Adapted) -> None:
    """T5 keeps some of its layers in float32, whatever the others are in."""
    half = Model(
        it.suite.entry,
        it.suite.folder,
        dtype="bfloat16",
        lora={"peft": str(it.suite.folder.parent / "peft.safetensors")},
    )

    @torch.inference_mode()
    def text(model: Model, *loras: Lora) -> Tensor:
        (state,) = model.pipeline.prepare(model.request(model.draft(loras=loras)))
        # tokens of the text, or the keys and values that blocks make of them
        made = [tensor for _, tensor in state.cond[COND].constants.values() if tensor.is_floating_point()]
        return torch.cat([tensor.float().flatten() for tensor in made])

    lora = Lora(lora_id="peft", scale=0.7)
    exact, got = text(it.model, lora), text(half, lora)
    assert cosine(got, exact) > 0.995
    assert cosine(got - text(half), exact - text(it.model)) > 0.98
