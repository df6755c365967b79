"""How much decoding in tiles differs from decoding whole: the VAE of the bundled model, on pictures that it drew.

    python -m benchmarks.bench_vae_tiles [--size 1024]

The pictures in docs/images/samples.webp, enlarged, go through the encoder, and their latents through the decoder:
whole, in tiles as the server makes them, and in smaller ones. PSNR in dB (peak 255) of the 8-bit pixels, the mean and
the largest difference of 8-bit pixels, and by comparison how far the whole decode is from the picture itself.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from benchmarks import provenance
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config.command_line import Parser
from omni_grpc.loading.components import load_module
from omni_grpc.pipeline.outputs import to_uint8
from omni_grpc.pipeline.tiles import Tiling
from omni_grpc.pipeline.vae import CausalVae

PICTURE = provenance.ROOT / "docs" / "images" / "samples.webp"
BUNDLED = Path(provenance.ROOT) / "omni_grpc" / "demo"
TILINGS = (Tiling(), Tiling(256, 64), Tiling(256, 128), Tiling(128, 32))


def differences(one: np.ndarray, other: np.ndarray) -> str:
    off = one.astype(np.float64) - other.astype(np.float64)
    psnr = 10 * np.log10(255**2 / max(float((off**2).mean()), 1e-12))
    return f"{psnr:7.1f} {np.abs(off).mean():8.3f} {np.abs(off).max():8.0f}"


def picture(size: int) -> Tensor:
    """[3, 1, size, size] in -1..1."""
    image = PIL.Image.open(PICTURE).convert("RGB").resize((size, size), PIL.Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[:, None].float() / 127.5 - 1


@torch.inference_mode()
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--size", type=int, default=1024, help="pixels along each edge")
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(BUNDLED, name="demo")
    vae = CausalVae(load_module(checkpoint, "vae", device="cpu", dtype=torch.float32))
    given = picture(options.size)
    latents = vae.encode(given)
    began = time.perf_counter()
    whole = to_uint8(vae.decode(latents)[0])
    seconds = time.perf_counter() - began
    print(provenance.text("benchmarks/bench_vae_tiles.py"))
    print(f"{options.size} x {options.size} pixels, float32, one thread of a CPU\n")
    print(f"{'tile':>5} {'overlap':>7} {'seconds':>8} {'PSNR':>7} {'mean':>8} {'largest':>8}")
    for tiling in TILINGS:
        vae.tiling = tiling
        began = time.perf_counter()
        with vae.in_tiles(True):
            tiled = to_uint8(vae.decode(latents)[0])
        took = time.perf_counter() - began
        print(f"{tiling.edge:5} {tiling.overlap:7} {took:8.2f} {differences(tiled, whole)}")
    print(f"whole, beside the picture: {seconds:.2f} s {differences(whole, to_uint8(given[:, 0]))}")


if __name__ == "__main__":
    main()
