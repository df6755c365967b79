"""Decoding in tiles: nothing is lost where a decoder looks at a pixel at a time, and little where it looks around."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage, AutoencoderKLWan
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from omni_grpc.pipeline.tiles import Tiling, _fades, _spans, decode_tiled
from omni_grpc.pipeline.vae import CausalVae, ImageVae, Vae

STATS = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
SMALL = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, **STATS}
VAES: Mapping[str, Callable[[], Vae]] = {
    "image": lambda: ImageVae(
        AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(8, 16, 16),
            norm_num_groups=4,
            latent_channels=4,
            scaling_factor=1.0,
            shift_factor=0.0,
        )
    ),
    "qwen": lambda: CausalVae(AutoencoderKLQwenImage(**SMALL, temperal_downsample=[False, True])),
    "wan": lambda: CausalVae(AutoencoderKLWan(**SMALL, temperal_downsample=[False, True])),
    "wan, patches": lambda: CausalVae(
        AutoencoderKLWan(
            **SMALL, temperal_downsample=[False, True], patch_size=2, in_channels=12, out_channels=12, is_residual=True
        )
    ),
}


def made(kind: str) -> Vae:
    torch.manual_seed(0)
    return VAES[kind]().eval().requires_grad_(False)


def psnr(one: Tensor, other: Tensor) -> float:
    """dB, of pixels in -1..1."""
    return float(10 * torch.log10(4 / (one - other).square().mean()))


@given(length=st.integers(1, 300), edge=st.integers(2, 64), part=st.floats(0.01, 0.99))
def test_tiles_cover_every_pixel_and_their_weights_sum_to_one(length: int, edge: int, part: float) -> None:
    overlap = min(max(1, int(edge * part)), edge - 1)
    spans = list(_spans(length, edge, overlap))
    total = torch.zeros(length * 2)
    for (begin, end), weight in zip(spans, _fades(spans, overlap, 2, torch.device("cpu")), strict=True):
        assert end - begin == min(edge, length)
        total[2 * begin : 2 * end] += weight
    assert (total - 1).abs().max() < 1e-5
    assert all(before[1] - after[0] >= overlap for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 40), (33, 17), (64, 64)])
def test_a_decoder_that_looks_at_one_pixel_at_a_time_gives_the_same(height: int, width: int) -> None:
    latents, sizes = torch.randn(3, 2, height, width), []

    def decode(part: Tensor) -> Tensor:
        sizes.append(part.shape[-2:])
        return part.transpose(0, 1).repeat_interleave(8, -1).repeat_interleave(8, -2)

    out = decode_tiled(decode, latents, Tiling(edge=64, overlap=16), 8)
    assert all(max(size) <= 8 for size in sizes)
    torch.testing.assert_close(out, decode(latents), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", list(VAES))
@torch.inference_mode()
def test_a_vae_decodes_in_tiles_nearly_what_it_decodes_whole(kind: str) -> None:
    vae = made(kind)
    vae.tiling = Tiling(edge=8 * vae.downscale, overlap=3 * vae.downscale)
    frames = 1 if kind == "image" else 2
    latents = torch.randn(4, frames, 12, 20)
    whole, seen = vae.decode(latents), []
    decode = vae.decode_whole
    vae.decode_whole = lambda part: (seen.append(part.shape[-2:]), decode(part))[1]  # type: ignore[method-assign]
    with vae.in_tiles(True):
        tiled = vae.decode(latents)
        small = vae.decode(latents[..., :8, :8])
    assert tiled.shape == whole.shape
    assert len(seen) == 2 * 4 + 1
    assert all(max(size) <= 8 for size in seen)
    assert 20 < psnr(tiled, whole) < 100, "close, not equal: it was not decoded whole"
    assert torch.equal(small, decode(latents[..., :8, :8])), "what fits in a tile is decoded whole"
    assert torch.equal(vae.decode(latents), whole)


@torch.inference_mode()
def test_encodes_go_on_as_they_are_while_another_thread_decodes_in_tiles() -> None:
    vae = made("wan")
    vae.tiling = Tiling(edge=32, overlap=8)
    pictures, latents = torch.rand(3, 5, 64, 64), torch.randn(4, 2, 32, 32)
    expected = vae.encode(pictures)
    stop = threading.Event()

    def decode() -> None:
        with torch.inference_mode(), vae.in_tiles(True):
            while not stop.is_set():
                vae.decode(latents)

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        assert all(torch.equal(vae.encode(pictures), expected) for _ in range(5))
    finally:
        stop.set()
        thread.join()


@torch.inference_mode()
def test_slicing_decodes_the_frames_of_an_image_vae_one_by_one() -> None:
    vae: Any = made("image")
    latents, batches = torch.randn(4, 3, 8, 8), []
    whole = vae.decode(latents)
    vae.module.enable_slicing()
    vae.module.decoder.register_forward_pre_hook(lambda module, inputs: batches.append(len(inputs[0])))
    torch.testing.assert_close(vae.decode(latents), whole, atol=1e-5, rtol=1e-5)
    assert batches == [1, 1, 1]


@torch.inference_mode()
def test_tiles_of_an_image_vae_are_decoded_frame_by_frame() -> None:
    vae: Any = made("image")
    vae.tiling, batches = Tiling(edge=32, overlap=8), []
    vae.module.decoder.register_forward_pre_hook(lambda module, inputs: batches.append(len(inputs[0])))
    with vae.in_tiles(True):
        assert vae.decode(torch.randn(4, 3, 16, 8)).shape[0] == 3
    assert set(batches) == {1}
