"""Trains the bundled model on a GPU that is at hand for minutes at a time, and goes on where it ended.

    python -m tools.train_demo.run STATE OUT [--vae SECONDS] [--denoiser SECONDS] [--before SECONDS] [--total SECONDS]

STATE is the folder that an earlier run wrote to its OUT; it may be empty. With --vae the VAE is trained first, which
throws the rest away: its latents are another language.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from safetensors.torch import load_file, save_file

from tools.train_demo import autoencoder, pool, sample
from tools.train_demo.denoiser import Parts
from tools.train_demo.loop import Data, Model, Plan, train
from tools.train_demo.words import tokenizer

DATA_VERSION = 1
SCENES = (220_000, 50_000, 50_000, 40_000, 20_000, 20_000, 30_000)
SHARES = (0.64, 0.08, 0.08, 0.08, 0.03, 0.03, 0.06)
"""Scenes of each bucket, and how often a step is one of its size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vae", type=float, default=0.0)
    parser.add_argument("--denoiser", type=float, default=0.0)
    parser.add_argument("--before", type=float, default=0.0)
    parser.add_argument("--total", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale-pool", type=float, default=1.0)
    parser.add_argument("--compile", action="store_true", help="fuse the elementwise parts of the denoiser")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    if args.compile:
        Parts.compile()
    began, processes = time.monotonic(), max(1, (os.cpu_count() or 2) - 1)
    counts = [int(count * args.scale_pool) for count in SCENES]
    pools = [pool.make(size, count, args.seed, processes) for size, count in zip(pool.BUCKETS, counts, strict=True)]
    print(f"{sum(counts)} scenes in {time.monotonic() - began:.0f} s", flush=True)
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(**autoencoder.CONFIG)
    card: dict[str, Any] = {"data": DATA_VERSION, "seed": args.seed, "card": torch.cuda.get_device_name()}
    if args.vae:
        card["vae"] = autoencoder.train(vae, pools[0], args.vae, args.seed)
    else:
        vae.load_state_dict(load_file(args.state / "vae.safetensors"))
        autoencoder.flat(vae.cuda())
        card["vae"] = json.loads((args.state / "log.json").read_text())["vae"]
    vae.eval().requires_grad_(False)
    save_file({name: x.contiguous().cpu() for name, x in vae.state_dict().items()}, args.out / "vae.safetensors")
    words = tokenizer()
    latents = [autoencoder.encode(vae, part) for part in pools]
    every = torch.cat([part.float().permute(1, 0, 2, 3).flatten(1)[:, ::7] for part in latents], 1)
    mean, std = every.mean(1), every.std(1)
    print(f"encoded after {time.monotonic() - began:.0f} s, std {std.min():.2f} to {std.max():.2f}", flush=True)
    card["scaling"] = {"mean": mean.tolist(), "std": std.tolist()}
    if args.denoiser:
        data = [Data.of(part, x, mean, std) for part, x in zip(pools, latents, strict=True)]
        del latents, every
        model, state = _resume(args.state, len(words), fresh=bool(args.vae))
        ids, length = pool.encode(words, "") or (None, 0)
        empty = torch.from_numpy(ids.astype("int64")).cuda(), length
        state = train(
            model,
            state,
            data,
            SHARES,
            empty,
            Plan(seconds=args.denoiser, before=args.before, total=args.total, seed=args.seed + 1),
        )
        _save(args.out, model, state)
        card["denoiser"], card["step"] = state["records"], state["step"]
        with torch.no_grad():
            for parameter, average in zip(model.parameters(), state["average"], strict=True):
                parameter.copy_(average)
        model.eval()
        chosen = sample.held_out(800, seed=11)
        pictures = sample.sample(model, vae, words, [caption for _, caption in chosen], (mean, std))
        card["accuracy"] = sample.accuracy([wish for wish, _ in chosen], pictures, processes)
        sample.save_grid(pictures[:40], args.out / "grid.png")
        card["captions"] = [caption for _, caption in chosen[:40]]
        print(card["accuracy"], flush=True)
    (args.out / "log.json").write_text(json.dumps(card))
    print(f"done after {time.monotonic() - began:.0f} s", flush=True)


def _resume(folder: Path, vocabulary: int, *, fresh: bool) -> tuple[Model, dict[str, Any] | None]:
    torch.manual_seed(0)
    model = Model(vocabulary)
    if fresh or not (folder / "average.safetensors").is_file():
        return model, None
    parts = {name: load_file(folder / f"{name}.safetensors") for name in ("average", "parameters", "m", "v")}
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict({name: x.float() for name, x in parts["parameters"].items()})
    log = json.loads((folder / "log.json").read_text())
    state: dict[str, Any] = {key: [part[name] for name in names] for key, part in parts.items()}
    return model, state | {"records": log["denoiser"], "step": log["step"]}


def _save(folder: Path, model: Model, state: dict[str, Any]) -> None:
    """In bfloat16: under 48 MiB in all, each file under 16 MiB."""
    names = [name for name, _ in model.named_parameters()]
    for key in ("average", "parameters", "m", "v"):
        tensors = {name: x.bfloat16().contiguous() for name, x in zip(names, state[key], strict=True)}
        save_file(tensors, folder / f"{key}.safetensors")


if __name__ == "__main__":
    main()
