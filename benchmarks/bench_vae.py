"""Times the decoder of Qwen-Image's VAE, random weights, 1024 x 1024, bfloat16: diffusers' and ours of it.

    python -m benchmarks.bench_vae     on a GPU

Milliseconds of the host's clock, and how far apart the two results are.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor

from benchmarks import provenance, timing
from omni_grpc.config.command_line import Parser
from omni_grpc.pipeline.causal_vae import optimize_causal_vae

REPEATS = 3


def timed(vae: Any, latents: Tensor) -> tuple[float, Tensor]:
    """Milliseconds of a decode, after two of them, and what it gives."""
    for _ in range(2):
        vae.decode(latents, return_dict=False)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        out: Tensor = vae.decode(latents, return_dict=False)[0]
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPEATS * 1e3, out


@torch.inference_mode()
def main() -> None:
    timing.require_gpu()
    torch.manual_seed(0)
    with torch.device("cuda"):
        vae = AutoencoderKLQwenImage().eval().to(torch.bfloat16).requires_grad_(False)
    latents = torch.randn(1, 16, 1, 128, 128, device="cuda", dtype=torch.bfloat16)
    theirs, wanted = timed(vae, latents)
    torch.cuda.reset_peak_memory_stats()
    ours, made = timed(optimize_causal_vae(vae), latents)
    off = float((made - wanted).float().norm() / wanted.float().norm())
    print(provenance.text("benchmarks/bench_vae.py"))
    print(
        f"Qwen-Image VAE 1024x1024 decode: diffusers {theirs:.1f} ms, simplified {ours:.1f} ms, difference {off:.2e}, "
        f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    )


if __name__ == "__main__":
    Parser(description=__doc__).parse_args()
    main()
