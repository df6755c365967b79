"""The layer in 8 bits by itself: what it computes, what it keeps, and what it refuses."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig, QuantizationConfig
from omni_grpc.features import Context, quant
from omni_grpc.features.layerwise_offload import Offloaded
from omni_grpc.features.quant import CODES, QuantizedLinear
from omni_grpc.loading.checkpoint import WEIGHT_FILE, load_weights
from omni_grpc.nn.activations import QuantizedActivation
from omni_grpc.nn.linear import AnyLinear, Linear
from omni_grpc.nn.stack import Stack
from omni_grpc.ops.quant import LARGEST, quantize_rows
from omni_grpc.types.errors import CheckpointError, ConfigError
from omni_grpc.types.spec import WeightMap
from omni_grpc.worker.build import build
from tests.features.offloaded import Two
from tests.features.suite import denoisers, save
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.toy import toy_spec

TOKENS, IN, OUT = 21, 48, 33
I8, F8 = CODES["int8"], CODES["fp8"]
ENTRY = ENTRIES["QwenImagePipeline"]

both = pytest.mark.parametrize("kind", [I8, F8], ids=["int8", "fp8"])


def layer(weight: Tensor, bias: Tensor | None = None, kind: torch.dtype = I8) -> QuantizedLinear:
    with torch.device("meta"):
        linear = Linear(weight.shape[1], weight.shape[0], bias is not None, stream="img")
    made = QuantizedLinear(linear, "some.layer", kind)
    assert made.shapes() == {"weight": tuple(weight.shape)} | ({} if bias is None else {"bias": tuple(bias.shape)})
    made.load_tensor("weight", weight)
    if bias is not None:
        made.load_tensor("bias", bias)
    return made


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_product_of_rounded_tokens_and_rounded_channels(
    dtype: torch.dtype, biased: bool, kind: torch.dtype
) -> None:
    weight, bias = draw(OUT, IN, dtype=dtype), draw(OUT, seed=1, dtype=dtype) if biased else None
    # tokens of unlike size: a scale of the whole tensor would lose the small ones
    x = draw(TOKENS, IN, seed=2, dtype=dtype) * torch.logspace(-4, 2, TOKENS)[:, None].to(dtype)
    made = layer(weight, bias, kind)
    assert made.weight.dtype == made.activation_dtype == kind
    assert made.weight.float().abs().amax(1).tolist() == [LARGEST[kind]] * OUT, "each channel uses the whole range"

    def rounded(values: Tensor) -> Tensor:
        step = values.double().abs().amax(1, keepdim=True) / LARGEST[kind]
        scaled = values.double() / step
        return (scaled.round() if kind == I8 else scaled.float().to(F8).double()) * step

    expected = rounded(x) @ rounded(weight).T + (0 if bias is None else bias.double())
    got = made(x)
    assert got.dtype == dtype
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    # of float8, a value next to the middle of two codes may fall to either side
    assert apart(got, expected) < (1e-6 if dtype is torch.float32 and kind == I8 else 0.005)
    assert apart(got, exact) < (0.02 if kind == I8 else 0.08), "small tokens are as close as large ones"


def apart(mine: Tensor, theirs: Tensor) -> float:
    """The largest relative distance of a token."""
    return float(((mine.double() - theirs).norm(dim=1) / theirs.norm(dim=1)).max())


@both
def test_a_token_does_not_depend_on_its_company(kind: torch.dtype) -> None:
    made, x = layer(draw(OUT, IN), kind=kind), draw(TOKENS, IN, seed=2)
    together = made(torch.cat([x, 1e4 * x]))
    for token in range(TOKENS):
        assert torch.equal(made(x[token : token + 1])[0], together[token])


@both
def test_tokens_that_come_in_8_bits_are_taken_as_they_are(kind: torch.dtype) -> None:
    made, x = layer(draw(OUT, IN), draw(OUT, seed=1), kind), draw(TOKENS, IN, seed=2, dtype=torch.bfloat16)
    coded = made(QuantizedActivation(*quantize_rows(x, kind), x.dtype))
    assert coded.dtype == torch.bfloat16
    assert torch.equal(coded, made(x))


@both
def test_a_token_of_zeros_gives_the_bias_and_one_that_is_not_finite_does_not_pass_for_a_number(
    kind: torch.dtype,
) -> None:
    bias = draw(OUT, seed=1)
    x = torch.zeros(4, IN)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    out = layer(draw(OUT, IN), bias, kind)(x)
    assert torch.equal(out[0], bias)
    assert torch.equal(out[3], bias)
    assert out[1].isnan().all()
    assert not out[2].isfinite().any()
    assert layer(draw(OUT, IN), kind=kind)(x[:0]).shape == (0, OUT)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_channel_without_a_scale_is_refused_with_its_layer(
    value: float, tiny_qwen_image: Path, tmp_path: Path
) -> None:
    weight = draw(OUT, IN)
    weight[7] = value
    for kind in (I8, F8):
        with pytest.raises(CheckpointError, match=r"some\.layer has output channels without a scale"):
            layer(weight, kind=kind)
    folder = Path(shutil.copytree(tiny_qwen_image, tmp_path / "copy"))
    file = folder / "transformer" / WEIGHT_FILE
    weights = safetensors.torch.load_file(file)
    weights["transformer_blocks.1.attn.to_v.weight"][3] = value
    safetensors.torch.save_file(weights, file)
    with pytest.raises(CheckpointError, match=r"--ignored-layers stack\.dual\.1\.attn\.to_qkv$"):
        Model(ENTRY, folder, quantization="int8")
    assert Model(
        ENTRY, folder, quantization="fp8", ignored_layers="stack.dual.1.attn.to_qkv"
    ).ready.found.quantized_layers


@pytest.mark.parametrize(
    ("ignored", "left"),
    [
        ("to_add_out", ["dual.0.attn.to_add_out", "dual.1.attn.to_add_out"]),
        # names of the checkpoint, of a layer that is renamed and of one that is fused
        ("transformer_blocks.1.img_mlp.net.2", ["dual.1.img_mlp.down"]),
        ("transformer_blocks.0.attn.add_k_proj,dual.1.txt_mlp", ["dual.0.attn.add_qkv_proj", "dual.1.txt_mlp"]),
        # patterns
        ("stack.dual.*.img_mlp.up", ["dual.0.img_mlp.up", "dual.1.img_mlp.up"]),
        (r"re:dual\.\d\.txt_mlp\.(up|down)$", ["dual.0.txt_mlp", "dual.1.txt_mlp"]),
    ],
)
def test_layers_are_left_out_by_any_part_of_their_names(ignored: str, left: list[str], tiny_qwen_image: Path) -> None:
    model = Model(ENTRY, tiny_qwen_image, quantization="int8", ignored_layers=ignored)
    as_they_are = [
        path
        for path, part in model.pipeline.transformer.stack.named_modules()
        if isinstance(part, Linear) and part.stream != "mod"
    ]
    assert all(any(path.startswith(name) for name in left) for path in as_they_are)
    assert all(any(path.startswith(name) for path in as_they_are) for name in left)
    assert model.ready.found.quantized_layers == {"int8": 16 - len(as_they_are)}
    assert model.ready.found.kept_layers == len(as_they_are)


def test_the_layers_that_a_model_calls_sensitive_are_left_out(tiny_qwen_image: Path) -> None:
    checkpoint = open_checkpoint(tiny_qwen_image)
    spec = dataclasses.replace(checkpoint.spec, sensitive_layers=("attn.to_out",))
    config = EngineConfig.from_settings(model="x", device="cpu", cpu_threads=1, warm_up_seconds=0, quantization="int8")
    _, _, ready = build(config, dataclasses.replace(checkpoint, spec=spec), "omni-test-", lambda loading: None)
    assert (ready.found.quantized_layers, ready.found.kept_layers) == ({"int8": 14}, 2)


def context(device: str = "cpu", **spec: object) -> Context:
    return Context(component="transformer", spec=toy_spec(**spec), device=torch.device(device), dtype=torch.float32)


def module() -> nn.Module:
    """Two blocks of two layers, the second called `gate`."""
    made = nn.Module()
    with torch.device("meta"):
        blocks = [Two(), Two()]
        for block in blocks:
            block.gate = Linear(8, 4, stream="img")
        made.stack = Stack(dual=blocks)
    return made


def test_routers_stay_as_they_are_where_a_model_says_nothing() -> None:
    made, told = module(), context()
    quant.apply(made, QuantizationConfig(quantization="int8"), told)
    assert {type(block.gate) for block in made.stack.group("dual")} == {Linear}
    assert told.effects.found.kept_layers == 2
    assert told.effects.found.quantized_layers["int8"] > 0
    made = module()
    quant.apply(made, QuantizationConfig(quantization="int8"), context(sensitive_layers=()))
    assert {type(block.gate) for block in made.stack.group("dual")} == {QuantizedLinear}


@pytest.mark.parametrize(
    ("capability", "scheme", "works"), [((8, 6), "fp8", False), ((8, 9), "fp8", True), ((8, 6), "int8", True)]
)
def test_a_card_that_cannot_multiply_float8_is_told_of_int8(
    capability: tuple[int, int], scheme: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    told = context("cuda:0")
    if works:
        quant.apply(module(), QuantizationConfig(quantization=scheme), told)
        assert not told.effects.warnings
        return
    with pytest.raises(ConfigError, match=r"capability 8\.9, cuda:0 has 8\.6; use --quantization int8") as caught:
        quant.apply(module(), QuantizationConfig(quantization=scheme), told)
    assert caught.value.reason == "QUANTIZATION_NOT_SUPPORTED"
    assert [violation.field for violation in caught.value.violations] == ["quantization"]


def test_every_reply_says_that_float8_costs_time_on_a_cpu(tiny_qwen_image: Path) -> None:
    ready = Model(ENTRY, tiny_qwen_image, quantization="fp8").ready
    assert [(warning.code, warning.applied) for warning in ready.warnings] == [("QUANTIZATION_WITHOUT_SPEED", "fp8")]
    assert not Model(ENTRY, tiny_qwen_image, quantization="int8").ready.warnings


def test_where_nothing_is_left_to_quantize_it_is_an_error(tiny_qwen_image: Path) -> None:
    with pytest.raises(ConfigError, match="finds no layer of transformer to quantize; left out: stack") as caught:
        Model(ENTRY, tiny_qwen_image, quantization="int8", ignored_layers="stack")
    assert caught.value.reason == "NOTHING_QUANTIZED"
    assert [violation.field for violation in caught.value.violations] == ["quantization"]


def test_layers_to_leave_out_of_nothing_are_an_error_and_a_name_of_none_is_logged(
    tiny_qwen_image: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="leaves out layers of --quantization, which is not given"):
        Model(ENTRY, tiny_qwen_image, ignored_layers="attn")
    Model(ENTRY, tiny_qwen_image, quantization="int8", ignored_layers="attn.to_out,no.such.layer")
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "--ignored-layers no.such.layer: no layer of transformer is called that"
    ]


@both
def test_weights_are_quantized_as_they_come(
    kind: torch.dtype, tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never is there more than one weight of a quantised layer in full precision."""
    take, full, scheme = QuantizedLinear.load_tensor, [], quant.NAMES[kind]

    def watched(self: QuantizedLinear, name: str, tensor: Tensor) -> None:
        take(self, name, tensor)
        taken.append(self)
        full.append(sum(part.weight.dtype != kind for part in taken if not part.weight.is_meta))

    taken: list[QuantizedLinear] = []
    monkeypatch.setattr(quant.QuantizedLinear, "load_tensor", watched)
    model = Model(ENTRY, tiny_qwen_image, quantization=scheme)
    assert len(set(taken)) == 16
    assert set(full) == {0}
    size = sum(p.numel() * p.element_size() for layer in set(taken) for p in layer.parameters())
    channels = sum(layer.out_features for layer in set(taken))
    assert size == sum(layer.in_features * layer.out_features for layer in set(taken)) + channels * (4 + 4)
    plain = Model(ENTRY, tiny_qwen_image)
    saved = 3 * sum(layer.in_features * layer.out_features for layer in set(taken)) - 4 * channels
    assert model.ready.weight_bytes == plain.ready.weight_bytes - saved


WIDE, DEPTH = 512, 12


class Deep(nn.Module):
    """A stack whose weights are all but equal: [WIDE, WIDE] each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(WIDE, WIDE, stream="img") for _ in range(DEPTH))


@both
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_held_while_weights_stream_in_is_near_the_quantised_size(
    kind: torch.dtype, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in bytes of all tensors that are alive whenever a layer has taken one: what is quantised, and for each
    thread one weight on its way.
    """
    save(
        {f"layers.{n}.{leaf}": draw(*shape) for n in range(DEPTH) for leaf, shape in SHAPES.items()},
        tmp_path / WEIGHT_FILE,
    )
    with torch.device("meta"):
        deep = Deep()
        for number, linear in enumerate(deep.layers):
            deep.layers[number] = QuantizedLinear(linear, f"layers.{number}", kind)
    gc.collect()
    before, held, take = alive(), [], QuantizedLinear.load_tensor

    def watched(self: QuantizedLinear, name: str, tensor: Tensor) -> None:
        take(self, name, tensor)
        held.append(alive() - before)

    monkeypatch.setattr(QuantizedLinear, "load_tensor", watched)
    load_weights(deep, tmp_path, WeightMap(), device="cpu", dtype=torch.float32, threads=threads)
    quantised, one = DEPTH * (WIDE * WIDE + 8 * WIDE), 4 * WIDE * WIDE
    gc.collect()
    assert alive() - before == quantised
    assert len(held) == 2 * DEPTH
    # one that was taken, and those that are read; a mapped file counts too while it is copied
    assert max(held) <= quantised + (2 * threads + 1) * one
    assert max(held) < DEPTH * one / (1 if threads > 1 else 2), "the whole in full precision would be more"


SHAPES = {"weight": (WIDE, WIDE), "bias": (WIDE,)}


def alive() -> int:
    """Bytes of the storages of all tensors there are, of those on the CPU."""
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu"
    }
    return sum(storages.values())


@both
def test_under_offload_the_host_holds_what_is_quantised(kind: torch.dtype, tiny_qwen_image: Path) -> None:
    scheme = quant.NAMES[kind]
    model = Model(ENTRY, tiny_qwen_image, quantization=scheme, enable_layerwise_offload=True)
    held = [part for part in denoisers(model)["transformer"].modules() if isinstance(part, Offloaded)]
    coded = [part for part in held if isinstance(part.base, QuantizedLinear)]
    assert len(coded) == 16
    for part in coded:
        assert {leaf: x.dtype for leaf, x in part.host.items()} == {
            "weight": kind,
            "scale": torch.float32,
            "bias": torch.float32,
        }
        assert part.host["weight"].nbytes == part.in_features * part.out_features
        assert part.activation_dtype == kind


def test_layers_of_full_precision_have_no_codes() -> None:
    linear = Linear(4, 4, stream="img")
    assert isinstance(linear, AnyLinear)
    assert linear.activation_dtype is None
    assert layer(draw(4, 4)).activation_dtype == I8
