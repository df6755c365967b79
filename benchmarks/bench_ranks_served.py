"""What several GPUs are worth behind the real server: replicas in images per second, ranks in seconds of one image, and
what the loss of a rank takes.

    python -m benchmarks.bench_ranks_served [--results FOLDER]     on two GPUs or more
    python -m benchmarks.bench_ranks_served --tiny                 on the CPU: it runs, and the times say nothing

A Qwen-Image with random weights, whose transformer has --layers blocks of the published size, is written to a temporary
folder; text encoder and VAE are tiny. Each line is a server of its own, on a free port. "images/s" is of --clients
clients who each ask for the next image when they have one, counted over --seconds; "one image" is the median of those
asked for one at a time; "differs": by how many of 255 levels a value of the picture differs at most from that of one
process. After SIGKILL of the last rank among the steps of a job: seconds until that job has failed, and until the next
one is finished.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import torch

from benchmarks import timing
from benchmarks.service import rank_loss
from benchmarks.service.server import Server, served
from omni_grpc.client import Client
from omni_grpc.config.command_line import Parser

PROMPT = "a red circle left of a blue square"
MOST_STEPS = 200
"""That a request may ask for."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A way to use so many GPUs. Seconds; None for what was not measured of it."""

    way: str
    gpus: int
    images_per_second: float | None = None
    one_image: float | None = None
    differs: int | None = None
    failed: float | None = None
    next_finished: float | None = None


@dataclasses.dataclass(frozen=True)
class Ask:
    """What is asked for."""

    size: int
    steps: int

    def image(self, client: Client, seed: int = 7) -> bytes:
        made = client.generate_image(
            PROMPT,
            negative_prompt="",
            true_cfg_scale=4.0,
            width=self.size,
            height=self.size,
            steps=self.steps,
            seed=seed,
        )
        return made.files[0]


def ways(gpus: int) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Names, GPUs and flags."""
    yield "one process", 1, ()
    for count in range(2, gpus + 1, 2):
        yield "replicas", count, ("--data-parallel-size", str(count))
        yield "sequence parallel", count, ("--sequence-parallel-size", str(count))
        yield "tensor parallel", count, ("--tensor-parallel-size", str(count))
    yield "HSDP", 2, ("--sequence-parallel-size", "2", "--use-hsdp")
    yield "CFG parallel", 2, ("--cfg-parallel-size", "2", "--vae-patch-parallel-size", "2")
    yield "pipeline parallel", 2, ("--pipeline-parallel-size", "2")


def measure(checkpoint: Path, options: argparse.Namespace, flags: Sequence[str], gpus: int) -> Iterator[Measurement]:
    ask, wanted = Ask(options.size, options.steps), None
    for way, count, more in ways(gpus):
        with _serving(checkpoint, [*flags, *more]) as (server, client):
            picture = _pixels(ask.image(client))
            wanted = picture if wanted is None else wanted
            taken = [_seconds(lambda seed=seed: ask.image(client, seed)) for seed in range(options.images)]
            rate = _rate(server, ask, options) if way in ("one process", "replicas") else None
            failed, finished = _loss(server, client, ask) if way == "sequence parallel" and count == 2 else (None, None)
            yield Measurement(
                way=way,
                gpus=count,
                images_per_second=rate,
                one_image=statistics.median(taken),
                differs=int(np.abs(picture - wanted).max()),
                failed=failed,
                next_finished=finished,
            )


@contextlib.contextmanager
def _serving(checkpoint: Path, flags: Sequence[str]) -> Iterator[tuple[Server, Client]]:
    with served(checkpoint, "--warm-up-seconds", "0", *flags) as server, Client(server.address) as client:
        yield server, client


def _pixels(data: bytes) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(data)).convert("RGB"), dtype=int)


def _seconds(call: object) -> float:
    began = time.perf_counter()
    assert callable(call)
    call()
    return time.perf_counter() - began


def _rate(server: Server, ask: Ask, options: argparse.Namespace) -> float:
    """Images per second, of clients who always wait for one."""
    made, over = [0] * options.clients, threading.Event()

    def work(number: int) -> None:
        with Client(server.address) as client:
            while not over.is_set():
                ask.image(client, seed=number)
                made[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(options.clients)]
    for thread in threads:
        thread.start()
    time.sleep(options.seconds / 4)
    before, began = sum(made), time.perf_counter()
    time.sleep(options.seconds)
    rate = (sum(made) - before) / (time.perf_counter() - began)
    over.set()
    for thread in threads:
        thread.join()
    return rate


def _loss(server: Server, client: Client, ask: Ask) -> tuple[float, float]:
    """Kills the last rank in the middle of a job. Raises RuntimeError where what comes of it is not as promised."""
    numbers = rank_loss.Numbers(size=max(ask.size, rank_loss.Numbers.size), steps=MOST_STEPS)
    loss = rank_loss.lose(server, client, 1, signal.SIGKILL, numbers)
    if not loss.retryable or loss.next_outcome != "completed":
        raise RuntimeError(f"not as it should be after the loss of a rank: {loss}")
    return loss.failed, loss.next_finished


def table(measurements: Sequence[Measurement]) -> str:
    lines = [f"{'way':18} {'GPUs':>4} {'images/s':>8} {'one image':>9} {'differs':>7} {'failed':>7} {'next':>7}"]
    for m in measurements:
        rate, one, failed, following = (
            "" if value is None else f"{value:.2f}"
            for value in (m.images_per_second, m.one_image, m.failed, m.next_finished)
        )
        lines.append(f"{m.way:18} {m.gpus:4} {rate:>8} {one:>9} {m.differs:>7} {failed:>7} {following:>7}")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="time replicas and ranks behind the real server")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU; nothing is recorded")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the transformer")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--images", type=int, default=5, help="how many are asked for one at a time")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0, help="that images are counted")
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    if not options.tiny:
        timing.require_gpu()
        if torch.cuda.device_count() < 2:
            print("needs at least two GPUs, and torch finds one", file=sys.stderr)
            raise SystemExit(timing.SKIPPED)
    from tools.tiny.images import build_qwen_image  # it imports much that a server does not need

    with tempfile.TemporaryDirectory() as folder:
        shape = {} if options.tiny else {"heads": 24, "head_dim": 128, "layers": options.layers}
        checkpoint = build_qwen_image(Path(folder) / "random", **shape)
        if options.tiny:
            options.size, options.steps, options.images, options.clients, options.seconds = 64, 4, 1, 2, 2.0
            print(table(list(measure(checkpoint, options, ("--device", "cpu"), 2))))
            return
        made = measure(checkpoint, options, ("--device", "cuda"), torch.cuda.device_count())
        script = "benchmarks/bench_ranks_served.py"
        print(table(timing.recorded(script, "ranks-served", made, options.results, model=f"{options.layers} blocks")))


if __name__ == "__main__":
    main()
