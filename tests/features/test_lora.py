"""Adapters on a model: parts of fused layers, rows, components, and adapters that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from omni_grpc.config import LoraConfig
from omni_grpc.features import Context, Effects
from omni_grpc.features.lora import LoraLinear, apply
from omni_grpc.loading.checkpoint import WeightTarget, WeightTargets
from omni_grpc.nn.linear import Linear, activate
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.types.errors import ConfigError, InvalidArgument
from omni_grpc.types.lora import Lora
from omni_grpc.types.spec import WeightMap
from tests.features.suite import save
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.toy import toy_spec

LAYOUTS = LayoutCache("cpu")
ENTRY = ENTRIES["QwenImagePipeline"]
QUERY = "transformer_blocks.0.attn.to_q"


def factors(name: str, out: int, inside: int, seed: int = 0, rank: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.lora_A.weight": torch.randn(rank, inside, generator=generator),
        f"{name}.lora_B.weight": torch.randn(out, rank, generator=generator),
    }


def wrapped(
    tmp_path: Path, tensors: Mapping[str, Tensor], places: WeightTargets, **more: object
) -> tuple[nn.Module, Effects]:
    """A module with one layer of 6 to 8 features, `layer`, and the adapter "a"."""
    module = nn.Module()
    module.layer = Linear(6, 8, stream="img").requires_grad_(False)
    save(tensors, tmp_path / "a.safetensors")
    context = Context(
        component="transformer",
        spec=toy_spec(weights={"transformer": WeightMap(), "transformer_2": WeightMap()}),
        device=torch.device("cpu"),
        dtype=torch.float32,
        places=places,
    )
    apply(module, LoraConfig(lora={"a": str(tmp_path / "a.safetensors")}), context)
    return module, context.effects


def owner(*loras: Lora) -> SimpleNamespace:
    return SimpleNamespace(request=SimpleNamespace(loras=loras))


def test_an_adapter_of_a_fused_part_lands_in_its_rows_however_large_the_parts_are(tmp_path: Path) -> None:
    """Queries of 4 features, keys of 1, values of 3: as with grouped heads, the parts are unlike."""
    places = {
        "q": WeightTarget("layer", slice(0, 4)),
        "k": WeightTarget("layer", slice(4, 5)),
        "v": WeightTarget("layer", slice(5, 8)),
    }
    tensors = factors("k", 1, 6) | factors("v", 3, 6, seed=1)
    module, effects = wrapped(tmp_path, tensors, places)
    rows = Rows([(owner(Lora(lora_id="a", scale=0.5)), "cond")], [Row.of(img=5)], LAYOUTS)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    with activate(rows):
        change = module.layer(x) - module.layer.base(x)
    expected = torch.zeros(5, 8)
    expected[:, 4:5] = 0.5 * x @ (tensors["k.lora_B.weight"] @ tensors["k.lora_A.weight"]).T
    expected[:, 5:8] = 0.5 * x @ (tensors["v.lora_B.weight"] @ tensors["v.lora_A.weight"]).T
    torch.testing.assert_close(change, expected, rtol=1e-4, atol=1e-5)
    assert {lora.id: lora.applied for lora in effects.found.loras}["a"] == {"transformer": 4}


def test_each_row_gets_its_own_adapters_and_a_row_alone_all_tokens_there_are(tmp_path: Path) -> None:
    module, _ = wrapped(tmp_path, factors("q", 8, 6), {"q": WeightTarget("layer")})
    with_it, without, weak = owner(Lora(lora_id="a")), owner(), owner(Lora(lora_id="a", scale=0.25))
    elsewhere = owner(Lora(lora_id="a", target="transformer_2"))
    states = [with_it, with_it, without, weak, elsewhere]
    rows = Rows([(state, "cond") for state in states], [Row.of(txt=2, img=n) for n in (3, 1, 2, 4, 2)], LAYOUTS)
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(2))
    base, change = module.layer.base(x), x @ (module.layer.parts["a"][0].up @ module.layer.parts["a"][0].down).T
    share = torch.tensor([1.0] * 4 + [0.0] * 2 + [0.25] * 4 + [0.0] * 2)[:, None]
    with activate(rows):
        torch.testing.assert_close(module.layer(x), base + share * change)
    # as in prepare, where the tokens are those of every step
    with activate(rows.narrow([0])):
        torch.testing.assert_close(module.layer(x), base + change)
    assert isinstance(module.layer, LoraLinear)
    assert torch.equal(module.layer.weight, module.layer.base.weight)
    assert module.layer.shapes() == module.layer.base.shapes()


def test_an_adapter_at_scale_zero_is_not_even_multiplied(tmp_path: Path) -> None:
    # each factor is finite, and their product is not
    huge = {key: factor * 1e30 for key, factor in factors("q", 8, 6).items()}
    module, _ = wrapped(tmp_path, huge, {"q": WeightTarget("layer")})
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    for scale, finite in ((0.0, True), (1.0, False)):
        with activate(Rows([(owner(Lora(lora_id="a", scale=scale)), "cond")], [Row.of(img=4)], LAYOUTS)):
            assert bool(module.layer(x).isfinite().all()) is finite


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (factors(QUERY, 127, 128), r"changes a weight \(127, 128\), the model's is \(128, 128\)"),
        (factors(QUERY, 128, 64), r"changes a weight \(128, 64\), the model's is \(128, 128\)"),
        (
            factors("lora_unet_blocks_0_to_q", 128, 128),
            "no key of a.safetensors fits a layer of the model; it has lora_",
        ),
        (factors("txt_norm", 64, 64), r"no key of a.safetensors fits a layer .* \(not a linear layer of the model\)"),
        (factors("text_encoder.layer", 8, 8), r"fits a layer .* \(no such layer in the model\)"),
        (factors("te_layer", 8, 8), r"fits a layer of the model; it has .* \(text encoder\)"),
        (
            {key: factor * 0 for key, factor in factors(QUERY, 128, 128).items()},
            r"no key of a.safetensors fits a layer .* \(zero\)",
        ),
        (
            factors(QUERY, 128, 128) | {f"{QUERY}.reshape_weight": torch.tensor([128, 256])},
            f"{QUERY} of a.safetensors is not served yet: reshape_weight gives .*; load a checkpoint that has them",
        ),
        (
            {f"transformer_blocks.{block}.attn.norm_q.diff_b": torch.ones(32) for block in (0, 1)},
            "transformer_blocks.0.attn.norm_q of the model has no bias; use a file without it, and a layer more",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_stops_the_start(
    tensors: dict[str, Tensor], message: str, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    save(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=message) as caught:
        Model(ENTRY, tiny_qwen_image, lora={"style": str(tmp_path / "a.safetensors")})
    assert caught.value.reason == "BAD_LORA"


@pytest.fixture(scope="module")
def model(tiny_qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    file = tmp_path_factory.mktemp("lora") / "style.safetensors"
    save(factors(QUERY, 128, 128) | factors("blocks.9.nothing", 4, 4), file)
    return Model(ENTRY, tiny_qwen_image, lora={"style": str(file)})


def test_keys_that_fit_nothing_are_told_and_only_layers_that_change_are_wrapped(model: Model) -> None:
    (adapter,) = model.ready.found.loras
    assert (adapter.id, adapter.file, adapter.rank) == ("style", "style.safetensors", 2)
    assert adapter.applied == {"transformer": 2}
    why = "no such layer in the model"
    assert adapter.skipped == {f"blocks.9.nothing.lora_{side}.weight": why for side in "AB"}
    found = [path for path, part in model.pipeline.named_modules() if isinstance(part, LoraLinear)]
    assert found == ["transformer.stack.dual.0.attn.to_qkv"]


@pytest.mark.parametrize(
    ("loras", "field", "message"),
    [
        ((Lora(lora_id="stile"),), "sampling.loras.lora_id", "'stile' is not loaded; loaded: style"),
        ((Lora(lora_id="style", scale=101.0),), "sampling.loras.scale", "101 is outside -100..100"),
        ((Lora(lora_id="style", scale=float("nan")),), "sampling.loras.scale", "nan is outside"),
        ((Lora(lora_id="style", target="vae"),), "sampling.loras.target", "it changes transformer"),
        ((Lora(lora_id="style"), Lora(lora_id="style", scale=2.0)), "sampling.loras", "names an adapter twice"),
        (tuple(Lora(lora_id=f"{n}") for n in range(9)), "sampling.loras", "has 9 entries; the maximum is 8"),
    ],
)
def test_a_request_for_what_is_not_there_is_refused_by_field(
    loras: tuple[Lora, ...], field: str, message: str, model: Model
) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        model.request(model.draft(loras=loras))
    assert field in [violation.field for violation in caught.value.violations]


def test_without_adapters_the_setting_is_named(tiny_qwen_image: Path) -> None:
    plain = Model(ENTRY, tiny_qwen_image)
    with pytest.raises(InvalidArgument, match=r"'style' is not loaded; load it with LoadLora, or start"):
        plain.request(plain.draft(loras=(Lora(lora_id="style"),)))
