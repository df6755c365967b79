"""The VAE of the bundled model: AutoencoderKLQwenImage, small, trained on single frames."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor

from tools.train_demo.pool import Pool
from tools.train_demo.ranks import Flat, agreed
from tools.train_demo.render import render

CONFIG: dict[str, Any] = {
    "base_dim": 16,
    "z_dim": 16,
    "dim_mult": [1, 2, 3, 3],
    "num_res_blocks": 1,
    "temperal_downsample": [False, False, False],
}
KL_WEIGHT = 2e-5
PEAK_RATE, WARM_UP = 1.5e-3, 300
BATCH = 48
LOGGED = 250
CLOCK = 10
"""Steps between two looks at the clock."""
PIXELS = 96 * 128 * 128
"""Of one call of the encoder, whatever the size of its pictures."""


def flat(module: torch.nn.Module) -> None:
    """A causal convolution of one frame sees zeros before it: the last slice of its kernel is all that counts, and a
    plain convolution does the same in a third of the time.
    """

    def forward(self: QwenImageCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        assert x.shape[2] == 1
        assert cache_x is None
        left, _, top, *_ = self._padding
        stride = self.stride[1:]
        return F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, stride, (top, left))[:, :, None]

    for part in module.modules():
        if isinstance(part, QwenImageCausalConv3d):
            part.forward = forward.__get__(part)  # type: ignore[method-assign]


class Step(torch.nn.Module):
    """Reconstruction of pixels [n, 3, 1, height, width] through noised latents: mean absolute and squared error, and
    the divergence of the latents from a unit Gaussian (https://arxiv.org/abs/2112.10752, section 3.1).
    """

    def __init__(self, vae: AutoencoderKLQwenImage) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, pixels: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logvar = self.vae.quant_conv(self.vae.encoder(pixels)).float().chunk(2, 1)
        logvar = logvar.clamp(-30, 20)
        latents = mean + (logvar / 2).exp() * noise
        again = self.vae.decoder(self.vae.post_quant_conv(latents)).float()
        error = again - pixels
        divergence = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
        return error.abs().mean(), error.pow(2).mean(), divergence


def train(vae: AutoencoderKLQwenImage, pool: Pool, seconds: float, seed: int) -> list[dict[str, float]]:
    """Trains on scenes of one size for so long, what the compiler takes at first included, and returns a record of
    losses.
    """
    device = torch.device("cuda")
    vae.to(device).train()
    flat(vae)
    step_of = torch.compile(Step(vae), dynamic=False)
    flat_parameters = Flat(vae.parameters())
    optimizer = torch.optim.AdamW([flat_parameters.value], PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    generator = torch.Generator(device).manual_seed(seed)
    torch.manual_seed(seed)
    things, ground = (torch.from_numpy(array).to(device) for array in (pool.things, pool.ground))
    width, height = pool.size
    shape = (BATCH, vae.config.z_dim, 1, height // 8, width // 8)
    began, compiled, step, records, sums = time.monotonic(), 0.0, 0, [], torch.zeros(3, device=device)
    while True:
        if step % CLOCK == 0:
            elapsed = agreed(time.monotonic() - began)
            if step == CLOCK:
                compiled = elapsed
            share = max(0.0, elapsed - compiled) / (seconds - compiled)
            if share >= 1:
                return records
        chosen = torch.randint(len(things), (BATCH,), device=device, generator=generator)
        pixels = render(things[chosen], ground[chosen], width, height)[:, :, None]
        rate = PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * share))
        optimizer.param_groups[0]["lr"] = rate
        with torch.autocast("cuda", torch.bfloat16):
            absolute, squared, divergence = step_of(pixels, torch.randn(shape, device=device))
        loss = absolute + 2 * squared + KL_WEIGHT * divergence
        flat_parameters.value.grad.zero_()  # type: ignore[union-attr]
        loss.backward()
        flat_parameters.average_grad(1.0)
        optimizer.step()
        sums += torch.stack([absolute, squared, divergence]).detach()
        step += 1
        if step % LOGGED == 0:
            mean_absolute, mean_squared, mean_divergence = (sums / LOGGED).tolist()
            psnr = -10 * math.log10(mean_squared / 4)
            records.append({"step": step, "l1": mean_absolute, "psnr": psnr, "kl": mean_divergence})
            print(
                f"vae {step}: {elapsed:.0f} s, l1 {mean_absolute:.4f}, psnr {psnr:.1f} dB, kl {mean_divergence:.2f}",
                flush=True,
            )
            sums.zero_()


@torch.inference_mode()
def encode(vae: AutoencoderKLQwenImage, pool: Pool) -> Tensor:
    """The mean latents of every scene of a pool, bfloat16 [n, 16, height / 8, width / 8]."""
    width, height = pool.size
    parts = []
    count = PIXELS * 4 // (width * height)
    for start in range(0, len(pool.lengths), count):
        things, ground = (torch.from_numpy(array[start : start + count]).cuda() for array in (pool.things, pool.ground))
        with torch.autocast("cuda", torch.bfloat16):
            pixels = render(things, ground, width, height)[:, :, None]
            parts.append(vae.encode(pixels).latent_dist.mean[:, :, 0].bfloat16())
    return torch.cat(parts)
