"""A quick look at how far training is: samples held-out captions in one batch and has them judged."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_grpc.scenes.captions import held_out as held_out
from omni_grpc.scenes.judge import judge
from omni_grpc.scenes.wish import Wish
from tools.train_demo.denoiser import rope
from tools.train_demo.loop import SHIFT, Model
from tools.train_demo.pool import TEXT, encode


@torch.inference_mode()
def sample(
    model: Model, vae: torch.nn.Module, words: object, captions: list[str], scaling: tuple[Tensor, Tensor], *,
    width: int = 128, height: int = 128, steps: int = 20, scale: float = 4.0, seed: int = 0,
) -> NDArray[np.uint8]:  # fmt: skip
    """Pictures [n, height, width, 3]: Euler steps, guidance that keeps the norm of the conditional prediction."""
    encoded = [encode(words, caption) for caption in [*captions, ""]]
    ids, lengths = (
        torch.from_numpy(np.stack(column).astype(np.int64)).cuda()
        for column in zip(*encoded, strict=True)  # type: ignore[arg-type]
    )
    n, h, w = len(captions), height // 16, width // 16
    table = rope(TEXT, h, w).cuda()
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(n, h * w, 64, device="cuda", generator=generator)
    levels = torch.linspace(1, 1 / steps, steps, device="cuda")
    levels = torch.cat([SHIFT * levels / (1 + (SHIFT - 1) * levels), levels.new_zeros(1)])
    empty = ids[-1:].expand(n, -1), lengths[-1:].expand(n)
    for now, then in itertools.pairwise(levels):
        t = now.expand(n)
        with torch.autocast("cuda", torch.bfloat16):
            cond = model(x, t, ids[:-1], lengths[:-1], table).float()
            uncond = model(x, t, *empty, table).float()
        guided = uncond + scale * (cond - uncond)
        guided = guided * (cond.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
        x = x + (then - now) * guided
    latents = x.unflatten(1, (h, w)).unflatten(3, (16, 2, 2)).permute(0, 3, 1, 4, 2, 5).reshape(n, 16, 2 * h, 2 * w)
    mean, std = (value.view(1, -1, 1, 1) for value in scaling)
    with torch.autocast("cuda", torch.bfloat16):
        parts = [vae.decode(part[:, :, None]).sample[:, :, 0] for part in (latents * std + mean).split(128)]
    pixels = (torch.cat(parts).float() * 127.5 + 127.5).clamp(0, 255).round().byte()
    array: NDArray[np.uint8] = pixels.permute(0, 2, 3, 1).cpu().numpy()
    return array


def accuracy(wishes: list[Wish], pictures: NDArray[np.uint8], processes: int) -> dict[str, float]:
    """Share of right pictures by kind of wish."""
    with ProcessPoolExecutor(processes) as executor:
        verdicts = list(executor.map(judge, wishes, pictures, chunksize=16))
    right, total = Counter[str](), Counter[str]()
    for wish, verdict in zip(wishes, verdicts, strict=True):
        total[wish.kind] += 1
        right[wish.kind] += verdict.right
        right["ground"] += verdict.ground
    return {kind: right[kind] / total[kind] for kind in total} | {"ground": right["ground"] / len(wishes)}


def save_grid(pictures: NDArray[np.uint8], file: Path, columns: int = 8) -> None:
    rows = [np.concatenate(list(pictures[at : at + columns]), 1) for at in range(0, len(pictures), columns)]
    PIL.Image.fromarray(np.concatenate(rows, 0)).save(file)
