"""Mixed jobs, all at once: how long until the last has ended, with shared steps and one job at a time."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omni_grpc.client import Client, ImageOptions

from .report import Result, spread
from .server import PATIENCE, Server, served

Image = npt.NDArray[np.uint8]
"""The pixels of an image, one after the other."""

SIZES = ((64, 64), (96, 64), (64, 128), (128, 128))
STEPS = (20, 50, 35, 80, 28)
GUIDED = (True, False, True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    jobs: int = 16
    repeats: int = 3
    most_steps: int = max(STEPS)


@dataclasses.dataclass(frozen=True)
class Round:
    """Seconds from the first job's creation to the last one's end, and the images by job."""

    seconds: float
    decode_seconds: float
    images: list[Image]


def run(checkpoint: Path) -> Result:
    with (
        served(checkpoint, "--max-num-seqs", "8") as batched,
        served(checkpoint, "--max-num-seqs", "1") as single,
    ):
        return measure(batched, single, Numbers())


def measure(batched: Server, single: Server, numbers: Numbers) -> Result:
    jobs = [_job(place, numbers.most_steps) for place in range(numbers.jobs)]
    rounds: dict[str, list[Round]] = {"batched": [], "single": []}
    with Client(batched.address) as many, Client(single.address) as one:
        for client in (many, one):
            _round(client, jobs[:2])  # pays for what is made at first use
        for _ in range(numbers.repeats):
            rounds["batched"].append(_round(many, jobs))
            rounds["single"].append(_round(one, jobs))
    return _result(jobs, rounds)


def _job(place: int, most_steps: int) -> ImageOptions:
    width, height = SIZES[place % len(SIZES)]
    options = ImageOptions(
        width=width,
        height=height,
        steps=min(STEPS[place % len(STEPS)], most_steps),
        seed=place,
        output_format="RAW_RGB8",
    )
    if GUIDED[place % len(GUIDED)]:
        options |= {"negative_prompt": "blurry", "true_cfg_scale": 3.0}
    return options


def _round(client: Client, jobs: list[ImageOptions]) -> Round:
    made = [client.create_job(f"a red circle, number {place}", **job) for place, job in enumerate(jobs)]
    results = [client.watch_job(job.job_id, timeout=PATIENCE).result() for job in made]
    ended = [client.get_job(job.job_id).end_time.ToNanoseconds() for job in made]
    return Round(
        seconds=(max(ended) - made[0].create_time.ToNanoseconds()) / 1e9,
        decode_seconds=sum(result.stats.decode for result in results),
        images=[np.frombuffer(result.files[0], np.uint8) for result in results],
    )


def _difference(one: Image, other: Image) -> int:
    """Of the two values that differ most, in steps of 255."""
    return int(np.abs(one.astype(int) - other).max())


def _result(jobs: list[ImageOptions], rounds: dict[str, list[Round]]) -> Result:
    reference = rounds["single"][0].images
    differences = [
        _difference(image, other)
        for it in (*rounds["batched"], *rounds["single"][1:])
        for image, other in zip(it.images, reference, strict=True)
    ]
    # how different two jobs are shows what an equality of images is worth
    others = [_difference(*pair) for pair in zip(reference, reference[len(SIZES) :], strict=False)]
    seconds = {how: [it.seconds for it in its] for how, its in rounds.items()}
    speedup = statistics.median(seconds["single"]) / statistics.median(seconds["batched"])
    steps = sum(job["steps"] or 0 for job in jobs)
    rows = [
        (
            label,
            spread(seconds[how], digits=2),
            spread([len(jobs) / total for total in seconds[how]], digits=2),
            spread([steps / total for total in seconds[how]], digits=0),
        )
        for how, label in (("batched", "8"), ("single", "1"))
    ]
    return Result(
        columns=("--max-num-seqs", "seconds for all", "jobs/s", "steps/s"),
        rows=[
            *rows,
            ("ratio", f"{speedup:.2f}x", "", ""),
            ("images", f"{len(differences)} compared, most difference {max(differences)} of 255", "", ""),
        ],
        figures={
            "jobs": len(jobs),
            "steps": steps,
            "seconds": seconds,
            "speedup": speedup,
            "decode_seconds": {how: [it.decode_seconds for it in its] for how, its in rounds.items()},
            "images_compared": len(differences),
            "images_unequal_bits": sum(difference > 0 for difference in differences),
            "largest_difference_of_255": max(differences),
            "least_difference_of_two_jobs": min(others, default=None),
        },
        problems=[f"images differ by up to {max(differences)} of 255"] if max(differences) > 1 else [],
    )
