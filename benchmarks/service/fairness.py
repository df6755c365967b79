"""A small job beside a big one, and a big one beside one small job and beside a stream of them."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from pathlib import Path

from omni_grpc.client import Client, ImageOptions

from .arrivals import STEP
from .report import Result
from .server import PATIENCE, Server, served

MOST_SLOWDOWN, MOST_LOSS, LEAST_SHARE = 3.0, 0.15, 0.3
"""Of a small job beside a big one, over one step of the big one; of the big one to one small job; and the share of the
machine that the big one keeps beside a stream of small ones, of which one half is fair and decoding takes some.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    repeats: int = 3
    small: tuple[int, int] = (128, 128)
    big: tuple[int, int] = (1024, 768)
    small_steps: int = 20
    big_steps: int = 12


def run(checkpoint: Path) -> Result:
    with served(checkpoint) as server:
        return measure(server, Numbers())


def measure(server: Server, numbers: Numbers) -> Result:
    small = _options(numbers.small, numbers.small_steps)
    big = _options(numbers.big, numbers.big_steps)
    with Client(server.address) as client:
        _alone(client, small)  # pays for what is made at first use
        smalls, bigs, besides, streams = [], [], [], []
        beside: list[float] = []
        stream: list[float] = []
        # in turns, so that what else the machine does falls on all of them
        for _ in range(numbers.repeats):
            smalls.append(_alone(client, small))
            bigs.append(_denoise(client, big, [], small))
            besides.append(_denoise(client, big, beside, small, count=1))
            streams.append(_denoise(client, big, stream, small, count=None))
    small_alone, big_alone = statistics.median(smalls), statistics.median(bigs)
    big_beside_one, big_beside_stream = statistics.median(besides), statistics.median(streams)
    step = big_alone / (numbers.big_steps - 1)
    slowdown = (statistics.median(beside) - step) / small_alone
    loss = big_beside_one / big_alone - 1
    share = big_alone / big_beside_stream
    rows = [
        ("small job alone", f"{small_alone:.2f} s"),
        ("a step of the big job alone", f"{step:.2f} s"),
        ("small job beside the big one", f"{statistics.median(beside):.2f} s"),
        ("... without one step of the big one, over its time alone", f"{slowdown:.1f}"),
        ("big job's steps, beside one small job, over alone", f"{1 + loss:.2f}"),
        ("big job's share beside a stream of small ones", f"{100 * share:.0f} %"),
        ("small jobs of the stream", f"{len(stream)}, {statistics.median(stream):.2f} s each"),
    ]
    problems = []
    if slowdown > MOST_SLOWDOWN:
        problems.append(f"a small job takes {slowdown:.1f} times its time alone, beside one step of the big one")
    if loss > MOST_LOSS:
        problems.append(f"the big job loses {100 * loss:.0f} % to one small job")
    if share < LEAST_SHARE:
        problems.append(f"the big job has {100 * share:.0f} % of the machine beside a stream of small ones")
    figures = {
        "numbers": dataclasses.asdict(numbers),
        "small_alone": small_alone,
        "small_beside": beside,
        "small_stream": stream,
        "big_step": step,
        "big_beside_one": big_beside_one / big_alone,
        "big_share_beside_stream": share,
    }
    return Result(columns=("what", "figure"), rows=rows, figures=figures, problems=problems)


def _options(size: tuple[int, int], steps: int) -> ImageOptions:
    return ImageOptions(width=size[0], height=size[1], steps=steps, seed=7)


def _alone(client: Client, options: ImageOptions) -> float:
    """Seconds from the creation of a job to its end."""
    began = time.monotonic()
    client.generate_image("a red circle", timeout=PATIENCE, **options)
    return time.monotonic() - began


def _denoise(
    client: Client, options: ImageOptions, others: list[float], small: ImageOptions, *, count: int | None = 0
) -> float:
    """Seconds from a big job's first step to its last, beside `count` small jobs (None: one after the other, to the
    end), whose seconds are added to `others`.
    """
    job = client.create_job("a red circle", **options)
    over = threading.Event()

    def beside() -> None:
        while not over.is_set() and (count is None or len(others) - before < count):
            others.append(_alone(client, small))

    before, thread, times = len(others), threading.Thread(target=beside), []
    for event in client.watch_job(job.job_id, timeout=2 * PATIENCE):
        if event.HasField(STEP):
            times.append(event.time.ToNanoseconds() / 1e9)
            if len(times) == 1:
                thread.start()
            if len(times) == options["steps"]:
                over.set()
    thread.join()
    return times[-1] - times[0]
