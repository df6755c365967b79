"""Random mixes of requests on a GPU whose memory is capped: whether any runs out of it, and how well that is foretold.

    python -m benchmarks.bench_memory_mixes [--caps 24 48] [--mixes 100] [--seconds 300] [--results FOLDER]  on a GPU
    python -m benchmarks.bench_memory_mixes --device cpu --mixes 2     the same without a cap, small, to try the script

A Z-Image of full size (denoiser and VAE; a tiny text encoder), random weights in bfloat16, behind the real engine, with
a cap for each process by torch.cuda.set_per_process_memory_fraction. A mix is two to four requests at once of 256 to
2048 pixels along each edge, 1 to 4 outputs, 1 or 2 steps, guided or not. Counted are jobs that ran out of memory,
allocations that failed (num_ooms of torch, which also sees those that the worker recovered from), refusals before
work, and decodes in tiles. "predicted" is the most that the scheduler thought to be taken at once during a mix,
"measured" the peak of torch's allocator meanwhile, both beyond the weights; a ratio below 1 is a prediction that was
too low, and the margin of the capacity is there for those.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import AutoencoderKL
from torch import nn

from benchmarks import provenance, timing
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.config.command_line import Parser
from omni_grpc.engine import Engine, Job, LocalExecutor, Submission
from omni_grpc.loading.loader import Loader
from omni_grpc.models.z_image.pipeline_text_to_image import ZImagePipeline
from omni_grpc.types.errors import OmniError
from omni_grpc.types.events import Completed, Failed
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Draft, GuidanceDraft
from omni_grpc.types.spec import Checkpoint
from tools.tiny_checkpoints import build_z_image

SCRIPT = "benchmarks/bench_memory_mixes.py"
GIB = 2**30
FULL: Mapping[str, Mapping[str, Any]] = {
    "transformer": {
        "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30,
        "axes_dims": [32, 48, 48], "axes_lens": [1024, 512, 512],
    },
    "vae": {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32},
}  # fmt: skip
"""What the configs of the released model say; the text encoder, and so `cap_feat_dim`, is that of the tiny one."""
SMALL: Mapping[str, Mapping[str, Any]] = {"transformer": {}, "vae": {}}
FROM_PARENT = "--one-cap"


@dataclasses.dataclass(frozen=True)
class Mix:
    """One mix. Bytes are beyond the weights."""

    jobs: int
    refused: int
    tiled: int
    out_of_memory: int
    failed: int
    failed_allocations: int
    retries: int
    predicted: float
    measured: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Measurement:
    """All mixes under one cap, in GiB where it is memory; `capacity` is what the worker found for requests."""

    cap: float
    capacity: float
    weights: float
    errors: Mapping[str, int]
    mixes: Sequence[Mix]


class RandomLoader(Loader):
    """Gives out components with random weights, made on the device."""

    def denoiser(self, component: str, build: Callable[[Mapping[str, Any]], Any]) -> Any:
        module = self._built(component, build)
        for edit in self.before:
            edit(module, component, {})
        module.to(self.dtype).to_empty(device=self.device)
        randomize(module)
        for edit in self.after:
            edit(module, component, {})
        self.loaded[component] = module
        return module

    def module(self, component: str, *, part: str = "") -> Any:
        if component != "vae":
            return super().module(component, part=part)
        config = self.checkpoint.configs[component]
        with torch.device(self.device):
            vae: Any = AutoencoderKL.from_config(dict(config))
        self.loaded[component] = vae.eval().requires_grad_(False).to(self.dtype)
        return vae


class RandomZImage(ZImagePipeline):
    """The pipeline of the checkpoint, with a denoiser and a VAE of random weights."""

    @classmethod
    def load(cls, loader: Loader) -> Self:
        fields = {field.name: getattr(loader, field.name) for field in dataclasses.fields(loader)}
        return super().load(RandomLoader(**fields))


@torch.no_grad()
def randomize(module: nn.Module) -> None:
    """So that what goes through the module keeps its size, more or less."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter[0].numel() ** -0.5)
        elif "norm" in name and name.endswith("weight"):
            parameter.fill_(1.0)
        else:
            parameter.zero_()


def checkpoint_of(folder: Path, sizes: Mapping[str, Mapping[str, Any]]) -> Checkpoint:
    """A tiny checkpoint, whose configs name larger components than its files have."""
    tiny = open_checkpoint(build_z_image(folder / "z_image"), name="z_image")
    configs = {name: {**config, **sizes.get(name, {})} for name, config in tiny.configs.items()}
    spec = dataclasses.replace(tiny.spec, pipeline="benchmarks.bench_memory_mixes:RandomZImage")
    return dataclasses.replace(tiny, spec=spec, configs=configs)


def draft(rng: random.Random, largest: int) -> Draft:
    """Small ones are as frequent as large ones, in octaves."""
    edge = lambda: 16 * round(2 ** rng.uniform(4, (largest // 16).bit_length() - 1))  # noqa: E731
    guided = rng.random() < 0.5
    return Draft(
        model="z_image",
        prompt="a red circle left of a blue square " * rng.choice([1, 20]),
        negative_prompt="blurry" if guided else None,
        guidance=GuidanceDraft(true_cfg_scale=4.0 if guided else 0.0),
        width=edge(),
        height=edge(),
        steps=rng.choice([1, 1, 2]),
        num_outputs=rng.choice([1, 1, 1, 2, 4]),
        seeds=(rng.randrange(1 << 30),),
        output_format=ImageFormat.JPEG,
    )


async def mixes_of(
    engine: Engine, weights: int, options: argparse.Namespace, until: float
) -> tuple[list[Mix], dict[str, int]]:
    """Mixes one after the other, until all are done or the time is up. And why jobs were not completed."""
    (replica,), made = engine.replicas, []
    scheduler, rng, errors = replica.scheduler, random.Random(0), collections.Counter[str]()
    plan, most = scheduler.plan, 0.0

    def noted() -> Any:
        nonlocal most
        decision = plan()
        most = max(most, scheduler.memory_taken)
        return decision

    scheduler.plan = noted  # type: ignore[method-assign]
    largest, ended = 256 if options.device == "cpu" else 2048, asyncio.Event()
    engine.on_end.append(lambda job: ended.set())
    while len(made) < options.mixes and time.monotonic() < until:
        most, began = 0.0, time.monotonic()
        before = start_of_mix()
        jobs: list[Job] = []
        asked = rng.randint(2, 4)
        for _ in range(asked):
            try:
                jobs.append(engine.submit(Submission(draft=draft(rng, largest)))[0])
            except OmniError as error:
                errors[f"refused: {error.reason}"] += 1
        while not all(job.ended for job in jobs):
            ended.clear()
            await ended.wait()
        ends = [job.entries[-1].event for job in jobs]
        reasons = [end.failure.reason for end in ends if isinstance(end, Failed)]
        errors.update(f"failed: {reason}" for reason in reasons)
        tiled = sum(any(one.code == "VAE_TILED" for one in end.warnings) for end in ends if isinstance(end, Completed))
        failed_allocations, retries, peak = end_of_mix(before)
        made.append(
            Mix(
                jobs=asked,
                refused=asked - len(jobs),
                tiled=tiled,
                out_of_memory=reasons.count("OUT_OF_MEMORY"),
                failed=len(reasons),
                failed_allocations=failed_allocations,
                retries=retries,
                predicted=most,
                measured=max(0.0, peak - weights),
                seconds=time.monotonic() - began,
            )
        )
    return made, dict(errors)


def start_of_mix() -> tuple[int, int]:
    """Failed allocations and retries so far; peaks are counted from here."""
    if not torch.cuda.is_available():
        return 0, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    stats = torch.cuda.memory_stats()
    return stats.get("num_ooms", 0), stats.get("num_alloc_retries", 0)


def end_of_mix(before: tuple[int, int]) -> tuple[int, int, int]:
    """Failed allocations, retries, and the peak in bytes, since then."""
    if not torch.cuda.is_available():
        return 0, 0, 0
    stats = torch.cuda.memory_stats()
    failed, retries = stats.get("num_ooms", 0) - before[0], stats.get("num_alloc_retries", 0) - before[1]
    return failed, retries, torch.cuda.max_memory_allocated()


async def measure(cap: float, options: argparse.Namespace, seconds: float) -> Measurement:
    """All mixes under one cap in GiB; 0: none."""
    deadline = time.monotonic() + seconds
    on_gpu = options.device != "cpu"
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * GIB / total))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = checkpoint_of(Path(folder), FULL if on_gpu else SMALL)
        config = EngineConfig.from_settings(
            model=str(checkpoint.path),
            device=options.device,
            dtype="bfloat16" if on_gpu else "float32",
            warm_up_seconds=options.warm_up_seconds if on_gpu else 0,
            **({"cuda_graph_tokens": None if options.graphs else 0} if on_gpu else {}),
        )
        engine = Engine(config, checkpoint, LocalExecutor(config, checkpoint, alone=True))
        await engine.start()
        gc.collect()
        weights = torch.cuda.memory_allocated() if on_gpu else 0
        capacity = engine.replicas[0].scheduler.memory.capacity / GIB
        print(f"cap {cap:g} GiB: ready, {capacity:.2f} GiB for requests beside {weights / GIB:.2f}", file=sys.stderr)
        mixes, errors = await mixes_of(engine, weights, options, deadline)
        await engine.close()
    return Measurement(cap, capacity if on_gpu else 0.0, weights / GIB, errors, mixes)


def ratios(mixes: Sequence[Mix]) -> list[float]:
    """Predicted over measured, in order."""
    return sorted(mix.predicted / mix.measured for mix in mixes if mix.measured and mix.predicted)


def table(measurements: Sequence[Measurement]) -> str:
    lines = [
        "cap   for requests  mixes  jobs  refused  tiled  out of memory  failed allocations  retries  "
        "predicted/measured: median  p5  p95  worst  largest peak/capacity"
    ]
    for one in measurements:
        total = {name: sum(getattr(mix, name) for mix in one.mixes) for name in Mix.__dataclass_fields__}
        found = ratios(one.mixes) or [float("nan")]
        of = statistics.quantiles(found, n=20) if len(found) > 1 else found * 19
        peak = max((mix.measured for mix in one.mixes), default=0.0) / GIB / one.capacity if one.capacity else 0.0
        lines.append(
            f"{one.cap:3g}  {one.capacity:12.2f}  {len(one.mixes):5}  {total['jobs']:4}  {total['refused']:7}  "
            f"{total['tiled']:5}  {total['out_of_memory']:13}  {total['failed_allocations']:18}  {total['retries']:7}  "
            f"{statistics.median(found):26.2f}  {of[0]:.2f}  {of[-1]:.2f}  {found[0]:.2f}  {peak:21.2f}"
        )
    for one in measurements:
        if one.errors:
            lines.append(f"{one.cap:3g}  " + ", ".join(f"{count} {what}" for what, count in sorted(one.errors.items())))
    return "\n".join(lines)


def in_own_process(cap: float, options: argparse.Namespace, seconds: float) -> Measurement:
    """A cap holds for a process, and so does what its allocator has kept. Raises SystemExit where it ends badly."""
    command = [
        sys.executable, "-m", "benchmarks.bench_memory_mixes", FROM_PARENT, str(cap), "--seconds", str(seconds),
        "--mixes", str(options.mixes), "--warm-up-seconds", str(options.warm_up_seconds), "--device", options.device,
        *(["--graphs"] if options.graphs else []),
    ]  # fmt: skip
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if options.expandable else {}
    done = subprocess.run(
        command,
        cwd=provenance.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=seconds + 60,
        env={**os.environ, **allocator},
    )
    if done.returncode:
        raise SystemExit(f"bench_memory_mixes: the process for {cap:g} GiB ended with {done.returncode}")
    values = json.loads(done.stdout.splitlines()[-1])
    return Measurement(**{**values, "mixes": [Mix(**mix) for mix in values["mixes"]]})


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--caps", type=float, nargs="+", default=[24.0, 48.0], help="GiB")
    parser.add_argument("--mixes", type=int, default=100, help="at most so many under each cap")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all caps together")
    parser.add_argument("--warm-up-seconds", type=float, default=10.0)
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs, whose tensors count as measured")
    parser.add_argument("--expandable", action="store_true", help="with expandable segments of torch's allocator")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--results", type=Path, default=timing.RESULTS)
    parser.add_argument(FROM_PARENT, type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda":
        timing.require_gpu()
    if options.one_cap is not None:
        print(json.dumps(dataclasses.asdict(asyncio.run(measure(options.one_cap, options, options.seconds)))))
        return
    caps = options.caps if options.device == "cuda" else [0.0]
    made = (in_own_process(cap, options, options.seconds / len(caps)) for cap in caps)
    if options.device == "cuda":
        print(table(timing.recorded(SCRIPT, "memory-mixes", made, options.results)))
    else:
        print(table(list(made)))


if __name__ == "__main__":
    main()
