"""The int8 layer by itself: what it computes, what it keeps, and what it refuses."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from omni_grpc.config import EngineConfig
from omni_grpc.errors import CheckpointError, ConfigError
from omni_grpc.features import int8
from omni_grpc.features.int8 import Int8Linear
from omni_grpc.loading.checkpoint import WEIGHT_FILE
from omni_grpc.nn.linear import Linear
from omni_grpc.registry import open_checkpoint
from omni_grpc.worker.build import build
from tests.models.cases import ENTRIES
from tests.models.model import Model

TOKENS, IN, OUT = 21, 48, 33


def layer(weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
    with torch.device("meta"):
        linear = Linear(weight.shape[1], weight.shape[0], bias is not None, stream="img")
    made = Int8Linear(linear, "some.layer")
    assert made.shapes() == {"weight": tuple(weight.shape)} | ({} if bias is None else {"bias": tuple(bias.shape)})
    made.take("weight", weight)
    if bias is not None:
        made.take("bias", bias)
    return made


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_product_of_rounded_tokens_and_rounded_channels(dtype: torch.dtype, biased: bool) -> None:
    weight, bias = draw(OUT, IN, dtype=dtype), draw(OUT, seed=1, dtype=dtype) if biased else None
    # tokens of unlike size: a scale of the whole tensor would lose the small ones
    x = draw(TOKENS, IN, seed=2, dtype=dtype) * torch.logspace(-4, 2, TOKENS)[:, None].to(dtype)
    made = layer(weight, bias)
    assert made.weight.dtype == torch.int8
    assert made.weight.abs().amax(1).tolist() == [127] * OUT, "each channel uses the whole range"

    def rounded(values: Tensor) -> Tensor:
        step = values.double().abs().amax(1, keepdim=True) / 127
        return (values.double() / step).round() * step

    expected = rounded(x) @ rounded(weight).T + (0 if bias is None else bias.double())
    got = made(x)
    assert got.dtype == dtype
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert apart(got, expected) < (1e-6 if dtype is torch.float32 else 0.005)
    assert apart(got, exact) < 0.02, "small tokens are as close as large ones"


def apart(mine: Tensor, theirs: Tensor) -> float:
    """The largest relative distance of a token."""
    return float(((mine.double() - theirs).norm(dim=1) / theirs.norm(dim=1)).max())


def test_a_token_does_not_depend_on_its_company() -> None:
    made, x = layer(draw(OUT, IN)), draw(TOKENS, IN, seed=2)
    together = made(torch.cat([x, 1e4 * x]))
    for token in range(TOKENS):
        assert torch.equal(made(x[token : token + 1])[0], together[token])


def test_a_token_of_zeros_gives_the_bias_and_one_that_is_not_finite_does_not_pass_for_a_number() -> None:
    bias = draw(OUT, seed=1)
    x = torch.zeros(4, IN)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    out = layer(draw(OUT, IN), bias)(x)
    assert torch.equal(out[0], bias)
    assert torch.equal(out[3], bias)
    assert out[1].isnan().all()
    assert not out[2].isfinite().any()
    assert layer(draw(OUT, IN))(x[:0]).shape == (0, OUT)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_channel_without_a_scale_is_refused_with_its_layer(
    value: float, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    weight = draw(OUT, IN)
    weight[7] = value
    with pytest.raises(CheckpointError, match=r"some\.layer has output channels without a scale"):
        layer(weight)
    folder = Path(shutil.copytree(tiny_qwen_image, tmp_path / "copy"))
    file = folder / "transformer" / WEIGHT_FILE
    weights = safetensors.torch.load_file(file)
    weights["transformer_blocks.1.attn.to_v.weight"][3] = value
    safetensors.torch.save_file(weights, file)
    entry = ENTRIES["QwenImagePipeline"]
    with pytest.raises(CheckpointError, match=r"--ignored-layers stack\.dual\.1\.attn\.to_qkv$"):
        Model(entry, folder, quantization="int8")
    assert Model(entry, folder, quantization="int8", ignored_layers="stack.dual.1.attn.to_qkv").ready.quantized_layers


@pytest.mark.parametrize(
    ("ignored", "left"),
    [
        ("to_add_out", ["dual.0.attn.to_add_out", "dual.1.attn.to_add_out"]),
        # names of the checkpoint, of a layer that is renamed and of one that is fused
        ("transformer_blocks.1.img_mlp.net.2", ["dual.1.img_mlp.down"]),
        ("transformer_blocks.0.attn.add_k_proj,dual.1.txt_mlp", ["dual.0.attn.add_qkv_proj", "dual.1.txt_mlp"]),
    ],
)
def test_layers_are_left_out_by_any_part_of_their_names(ignored: str, left: list[str], tiny_qwen_image: Path) -> None:
    model = Model(ENTRIES["QwenImagePipeline"], tiny_qwen_image, quantization="int8", ignored_layers=ignored)
    as_they_are = [
        path
        for path, part in model.pipeline.transformer.stack.named_modules()
        if isinstance(part, Linear) and part.stream != "mod"
    ]
    assert all(any(path.startswith(name) for name in left) for path in as_they_are)
    assert all(any(path.startswith(name) for path in as_they_are) for name in left)
    assert model.ready.quantized_layers == {"int8": 16 - len(as_they_are)}


def test_the_layers_that_a_model_calls_sensitive_are_left_out(tiny_qwen_image: Path) -> None:
    checkpoint = open_checkpoint(tiny_qwen_image)
    spec = dataclasses.replace(checkpoint.spec, sensitive_layers=("attn.to_out",))
    config = EngineConfig.from_settings(model="x", device="cpu", cpu_threads=1, warm_up_seconds=0, quantization="int8")
    _, ready = build(config, dataclasses.replace(checkpoint, spec=spec), "omni-test-")
    assert ready.quantized_layers == {"int8": 14}


def test_where_nothing_is_left_to_quantize_it_is_an_error(tiny_qwen_image: Path) -> None:
    with pytest.raises(ConfigError, match="finds no layer of transformer to quantise; left out: stack") as caught:
        Model(ENTRIES["QwenImagePipeline"], tiny_qwen_image, quantization="int8", ignored_layers="stack")
    assert caught.value.reason == "NOTHING_QUANTIZED"
    assert [violation.field for violation in caught.value.violations] == ["quantization"]


def test_weights_are_quantized_as_they_come(tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never is there more than one weight of a quantised layer in full precision."""
    take, full = Int8Linear.take, []

    def watched(self: Int8Linear, name: str, tensor: Tensor) -> None:
        take(self, name, tensor)
        taken.append(self)
        full.append(sum(part.weight.dtype != torch.int8 for part in taken if not part.weight.is_meta))

    taken: list[Int8Linear] = []
    monkeypatch.setattr(int8.Int8Linear, "take", watched)
    model = Model(ENTRIES["QwenImagePipeline"], tiny_qwen_image, quantization="int8")
    assert len(set(taken)) == 16
    assert set(full) == {0}
    size = sum(p.numel() * p.element_size() for layer in set(taken) for p in layer.parameters())
    channels = sum(layer.out_features for layer in set(taken))
    assert size == sum(layer.in_features * layer.out_features for layer in set(taken)) + channels * (4 + 4)
    plain = Model(ENTRIES["QwenImagePipeline"], tiny_qwen_image)
    saved = 3 * sum(layer.in_features * layer.out_features for layer in set(taken)) - 4 * channels
    assert model.ready.weight_bytes == plain.ready.weight_bytes - saved
