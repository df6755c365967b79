"""Trains the bundled model on a GPU that is at hand for minutes at a time, and goes on where it ended.

    python -m tools.train_demo.run STATE OUT [--vae SECONDS] [--denoiser SECONDS] [--before SECONDS] [--total SECONDS]

STATE is the folder that an earlier run wrote to its OUT; it may be empty. With --vae the VAE is trained first, which
throws the rest away: its latents are another language.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLQwenImage
from safetensors.torch import load_file, save_file

from omni_grpc.config.command_line import Parser
from tools.train_demo import autoencoder, pool, sample
from tools.train_demo.loop import Data, Model, Plan, train
from tools.train_demo.ranks import agreed, averaged
from tools.train_demo.words import tokenizer

DATA_VERSION = 1
SCENES = (220_000, 50_000, 50_000, 40_000, 20_000, 20_000, 30_000)
SHARES = (0.64, 0.08, 0.08, 0.08, 0.03, 0.03, 0.06)
"""Scenes of each bucket, and how often a step is one of its size."""


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("state", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vae", type=float, default=0.0)
    parser.add_argument("--denoiser", type=float, default=0.0)
    parser.add_argument("--before", type=float, default=0.0)
    parser.add_argument("--total", type=float, default=0.0)
    parser.add_argument("--compile", type=float, default=0.0, help="seconds in which further sizes may be compiled")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after the start at which training ends")
    parser.add_argument("--judge", type=int, default=800, help="held-out captions that are drawn and judged at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pools", type=Path, help="scenes that `python -m tools.train_demo.pool` made ahead")
    parser.add_argument("--scale-pool", type=float, default=1.0)
    args = parser.parse_args()
    args.began, args.ranks = time.time(), tempfile.mkdtemp()
    args.out.mkdir(parents=True, exist_ok=True)
    size = torch.cuda.device_count()
    if size == 1:
        _rank(0, 1, args)
    else:
        torch.multiprocessing.spawn(_rank, (size, args), nprocs=size)


def _rank(rank: int, size: int, args: argparse.Namespace) -> None:
    """What one GPU does. Scenes differ between ranks and runs; rank 0 writes and prints."""
    say = print if rank == 0 else lambda *_, **__: None
    elapsed = lambda: time.time() - args.began  # noqa: E731
    processes = max(1, (os.cpu_count() or 2) // size - 1)
    seed = 1000 * args.seed + rank
    counts = [int(count * args.scale_pool) for count in SCENES]
    if args.pools:
        pools = pool.load(args.pools, rank, size, args.scale_pool)
    else:
        pools = [pool.make(place, count, seed, processes) for place, count in zip(pool.BUCKETS, counts, strict=True)]
    say(f"{sum(len(part.lengths) for part in pools)} scenes of each rank after {elapsed():.0f} s", flush=True)
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    if size > 1:
        store = dist.FileStore(args.ranks + "/store", size)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
    vae, card = _autoencoder(args, pools[0], seed, rank)
    words = tokenizer()
    latents = [autoencoder.encode(vae, part) for part in pools]
    if args.vae:
        every = torch.cat([part.float().permute(1, 0, 2, 3).flatten(1)[:, ::7] for part in latents], 1)
        mean = averaged(every.mean(1))
        std = averaged((every - mean[:, None]).pow(2).mean(1)).sqrt()
        card["scaling"] = {"mean": mean.tolist(), "std": std.tolist()}
        del every
    mean, std = (torch.tensor(card["scaling"][name], device="cuda") for name in ("mean", "std"))
    say(f"encoded after {elapsed():.0f} s, std {std.min():.2f} to {std.max():.2f}", flush=True)
    if rank == 0:
        _write_log(args.out, card)
    if args.denoiser:
        _denoiser(args, rank, seed, (vae, words, card), pools, latents, (mean, std))
    say(f"done after {elapsed():.0f} s", flush=True)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def _autoencoder(
    args: argparse.Namespace, scenes: pool.Pool, seed: int, rank: int
) -> tuple[AutoencoderKLQwenImage, dict[str, Any]]:
    """Trains the VAE or loads it, and what the log says of it."""
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(**autoencoder.CONFIG)
    card: dict[str, Any] = {
        "data": DATA_VERSION,
        "seed": args.seed,
        "card": torch.cuda.get_device_name(),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    }
    if args.vae:
        card["vae"] = autoencoder.train(vae, scenes, args.vae, seed)
    else:
        vae.load_state_dict(load_file(args.state / "vae.safetensors"))
        autoencoder.flat(vae.cuda())
        log = json.loads((args.state / "log.json").read_text())
        card |= {name: log[name] for name in ("vae", "scaling")} | {"runs": log.get("runs", [])}
    vae.eval().requires_grad_(False)
    if rank == 0:
        weights = {name: x.detach().contiguous().cpu().clone() for name, x in vae.state_dict().items()}
        save_file(weights, args.out / "vae.safetensors")
    return vae, card


def _denoiser(
    args: argparse.Namespace,
    rank: int,
    seed: int,
    made: tuple[torch.nn.Module, Any, dict[str, Any]],
    pools: list[pool.Pool],
    latents: list[torch.Tensor],
    scaling: tuple[torch.Tensor, torch.Tensor],
) -> None:
    vae, words, card = made
    data = [Data.of(part, x, *scaling) for part, x in zip(pools, latents, strict=True)]
    latents.clear()
    model, state = _resume(args.state, len(words), fresh=bool(args.vae))
    ids, length = pool.encode(words, "") or (None, 0)
    empty = torch.from_numpy(ids.astype("int64")).cuda(), length

    earlier = card.get("runs", [])

    def keep(state: dict[str, Any]) -> None:
        if rank == 0:
            _save(args.out, model, state)
            card["denoiser"], card["step"] = state["records"], state["step"]
            card["runs"] = [*earlier, {name: card[name] for name in ("seed", "card", "ranks", "step")}]
            _write_log(args.out, card)

    seconds = agreed(min(args.denoiser, args.until - (time.time() - args.began)))
    plan = Plan(
        seconds=seconds,
        before=args.before,
        total=args.total,
        seed=seed + 500,
        keep=keep,
        compile=args.compile,
    )
    torch.manual_seed(seed)
    state = train(model, state, data, SHARES, empty, plan)
    keep(state)
    if rank:
        return
    del data
    with torch.no_grad():
        for parameter, average in zip(model.parameters(), state["average"], strict=True):
            parameter.copy_(average)
    model.eval()
    chosen = sample.held_out(max(40, args.judge), seed=11)
    pictures = sample.sample(model, vae, words, [caption for _, caption in chosen], scaling)
    sample.save_grid(pictures[:40], args.out / "grid.png")
    card["captions"] = [caption for _, caption in chosen[:40]]
    _write_log(args.out, card)
    if args.judge:
        card["accuracy"] = sample.accuracy([wish for wish, _ in chosen], pictures, max(1, (os.cpu_count() or 2) - 1))
        _write_log(args.out, card)
        print(card["accuracy"], flush=True)


def _write_log(folder: Path, card: dict[str, Any]) -> None:
    (folder / "log.json").write_text(json.dumps(card))


def _resume(folder: Path, vocabulary: int, *, fresh: bool) -> tuple[Model, dict[str, Any] | None]:
    torch.manual_seed(0)
    model = Model(vocabulary)
    if fresh or not (folder / "average.safetensors").is_file():
        return model, None
    kept = [name for name in ("average", "parameters", "m", "v") if (folder / f"{name}.safetensors").is_file()]
    parts = {name: load_file(folder / f"{name}.safetensors") for name in kept}
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
