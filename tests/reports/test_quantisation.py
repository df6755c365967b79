"""Weights in 8 bits: whether they are really used, what they cost, and what becomes of scales that are none.

What is different on a GPU is in tests/features/test_on_gpu.py, under the same numbers.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from omni_grpc import InternalError, Omni
from omni_grpc.features.quant import CODES, QuantizedLinear
from omni_grpc.loading.checkpoint import WEIGHT_FILE
from omni_grpc.nn.linear import AnyLinear, Linear
from omni_grpc.nn.rows import MOD
from omni_grpc.ops.quant import quantize_rows
from omni_grpc.types.errors import FailedPrecondition

SCHEMES = pytest.mark.parametrize("scheme", ["fp8", "int8"])
PSNR = {"fp8": 30.0, "int8": 38.0}
"""Least decibels between pictures in 8 bits and in float32, for a tiny model with random weights."""


def serving(folder: Path, **settings: object) -> Omni:
    return Omni(str(folder), **{"device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0} | settings)


def small(omni: Omni, **changes: object):
    return omni.generate(**({"prompt": "a red circle", "width": 32, "height": 32, "steps": 2, "seed": 7} | changes))


def denoiser(omni: Omni) -> torch.nn.Module:
    return omni._engine.replicas[0].executor._worker._runner._pipeline.transformer


# report B057
@SCHEMES
def test_pictures_stay_close_and_what_is_sensitive_stays_in_full_precision(omni, tiny_qwen_image, scheme):
    with serving(tiny_qwen_image, quantization=scheme, ignored_layers="attn.to_out") as quantised:
        mine, exact = (np.asarray(small(each).images[0], dtype=float) for each in (quantised, omni))
        layers = {path: part for path, part in denoiser(quantised).named_modules() if isinstance(part, AnyLinear)}
    assert 10 * np.log10(255**2 / ((mine - exact) ** 2).mean()) > PSNR[scheme]
    for path, layer in layers.items():
        kept = not path.startswith("stack.") or layer.stream == MOD or "attn.to_out" in path
        assert (layer.weight.dtype == torch.float32) == kept, path


@pytest.fixture
def stored(tiny_qwen_image: Path, tmp_path: Path):
    """A copy of the checkpoint with one matrix in float8, with or without its scale."""

    def make(*, scale: bool) -> Path:
        folder = Path(shutil.copytree(tiny_qwen_image, tmp_path / f"copy-{scale}"))
        file = folder / "transformer" / WEIGHT_FILE
        weights, key = safetensors.torch.load_file(file), "transformer_blocks.0.img_mlp.net.2.weight"
        codes, scales = quantize_rows(weights[key], torch.float8_e4m3fn)
        weights |= {key: codes, **({f"{key}_scale": scales[:, None]} if scale else {})}
        safetensors.torch.save_file(weights, file)
        return folder

    return make


# report B058
def test_a_scale_that_is_missing_stops_the_start_and_one_that_is_no_number_the_request(stored, tiny_qwen_image):
    with pytest.raises(FailedPrecondition, match=r"lack a scale \(weight_scale\): transformer_blocks\.0\.img_mlp"):
        serving(stored(scale=False))
    with serving(tiny_qwen_image, quantization="fp8") as omni:
        layer = denoiser(omni).stack.dual[1].img_mlp.down
        good = layer.scale.clone()
        with torch.inference_mode():
            layer.scale[3] = torch.nan
        with pytest.raises(InternalError) as caught:
            small(omni)
        assert caught.value.reason == "NON_FINITE_LATENTS"
        with torch.inference_mode():
            layer.scale.copy_(good)
        assert small(omni).images


# report B059
@SCHEMES
def test_what_is_asked_in_8_bits_is_in_8_bits_and_the_reply_counts_it(tiny_qwen_image, scheme):
    with serving(tiny_qwen_image, quantization=scheme) as omni:
        effective = small(omni).effective
        layers = [part for part in denoiser(omni).modules() if isinstance(part, QuantizedLinear)]
        kept = [part for part in denoiser(omni).stack.modules() if type(part) is Linear and part.stream != MOD]
    assert effective.quantized_layers == {scheme: len(layers)}
    assert effective.kept_layers == len(kept) == 0
    assert layers
    for layer in layers:
        assert layer.weight.dtype == CODES[scheme]
        assert layer.weight.nbytes == layer.in_features * layer.out_features


# report B059
def test_a_checkpoint_in_float8_runs_in_float8(stored):
    with serving(stored(scale=True)) as omni:
        effective = small(omni).effective
        assert effective.quantized_layers == {"fp8": 1}
        assert effective.kept_layers == 15


# report B061
@SCHEMES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_scaled_before_they_are_rounded_so_outliers_do_not_overflow(scheme, dtype):
    """What the codes of the weight make of the tokens goes beyond 65504, the largest number of float16; the output does
    not.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 4096, generator=generator) / 640, torch.randn(8, 4096, generator=generator)
    x[:, 100], x[:, 101] = 1e4, -1e4
    layer = QuantizedLinear(Linear(4096, 64, bias=False, stream="img"), "layer", CODES[scheme])
    layer.load_tensor("weight", weight)
    out, exact = layer(x.to(dtype)), x.double() @ weight.double().T
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert (out.double() - exact).norm() < 0.05 * exact.norm()
    assert (x.double() @ layer.weight.double().T).abs().max() > 65504 > exact.abs().max(), "the case is one"


# report B062
@SCHEMES
def test_several_outputs_are_each_what_it_is_alone(tiny_qwen_image, scheme):
    with serving(tiny_qwen_image, quantization=scheme) as omni:
        together = small(omni, num_outputs=3).images
        for number, image in enumerate(together):
            # an odd size beside it, and a batch whose rows have other lengths
            alone = small(omni, seed=7 + number).images[0]
            assert np.abs(np.asarray(image, dtype=int) - np.asarray(alone, dtype=int)).max() <= 1
        assert small(omni, width=48, num_outputs=2).images
