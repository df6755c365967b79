"""An engine over ranks gives what it gives over one process: pixels, progress, cancelled jobs, a model that sleeps."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from omni_grpc.engine import JobState
from omni_grpc.engine.executor import ProcessExecutor
from omni_grpc.engine.rank_executor import RankExecutor
from omni_grpc.types.plan import SleepLevel
from omni_grpc.types.request import Task
from tests.ranks.group import Served, events, serving, until
from tools.tiny_checkpoints import BUILDERS

WAYS: dict[str, dict[str, object]] = {
    "ulysses": {"ulysses_degree": 2, "vae_patch_parallel_size": 2},
    "ring": {"ring_degree": 2, "enable_diffusion_pipeline_profiler": True},
    "sequence": {"sequence_parallel_size": 2, "vae_patch_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2, "vae_patch_parallel_size": 2},
    "branches": {"cfg_parallel_size": 2, "vae_use_tiling": True},
    "pipeline": {"pipeline_parallel_size": 2},
    "hsdp": {"ulysses_degree": 2, "use_hsdp": True},
}
VIDEOS = ("wan_t2v",)
FAMILIES = {"ulysses": ("qwen_image", "z_image", "flux", *VIDEOS), "tensor": ("qwen_image", "flux", "wan_t2v")}
"""Those that a way is tried on, one of each family of blocks and a video; others on Qwen-Image."""
PAIRS = [(family, way) for way in WAYS for family in FAMILIES.get(way, ("qwen_image",))]


async def made_by(served: Served, family: str) -> list[np.ndarray]:
    """The pixels of a large and a small job, which share steps; of videos, those of each frame."""
    video = {"task": Task.TEXT_TO_VIDEO, "height": 32}
    of_large, of_small = ({} if family not in VIDEOS else {**video, "num_frames": count} for count in (9, 5))
    steps = 3 if family in VIDEOS else 6
    large = served.submit(**{"width": 96, "height": 64, "steps": steps, "seeds": (1,)} | of_large)
    small = served.submit("a blue square", **{"width": 64, "steps": steps // 2, "seeds": (2,)} | of_small)
    return [*await served.pixels(large), *await served.pixels(small)]


class Models:
    """Tiny checkpoints, each with the pixels of one process, made by the first test that asks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[str, Path] = {}
        self._pixels: dict[str, Sequence[np.ndarray]] = {}

    def path(self, family: str) -> Path:
        if family not in self._paths:
            self._paths[family] = BUILDERS[family](self._folder / family)
        return self._paths[family]

    async def pixels(self, family: str) -> Sequence[np.ndarray]:
        if family not in self._pixels:
            async with serving(self.path(family)) as served:
                self._pixels[family] = await made_by(served, family)
        return self._pixels[family]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("family", "way"), PAIRS)
async def test_ranks_make_the_pixels_of_one_process(models: Models, family: str, way: str) -> None:
    """One of 255 in a single pixel may change what an encoder with losses makes of the pixels around it."""
    alone = await models.pixels(family)
    async with serving(models.path(family), **WAYS[way]) as served:
        assert len(served.pids) == 2
        ours = await made_by(served, family)
        assert [picture.shape for picture in ours] == [picture.shape for picture in alone]
        apart = [np.abs(mine - theirs) for mine, theirs in zip(ours, alone, strict=True)]
        assert family in VIDEOS or max(each.max() for each in apart) <= 1
        assert max(each.mean() for each in apart) < 0.1
        assert max((each > 8).mean() for each in apart) < 0.01
        assert min(picture.std() for picture in alone) > 1, "there is something to be seen"


async def test_a_video_of_two_segments_has_the_frames_of_one_process(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared before they are encoded: in a file, one of 255 in a pixel changes all frames after it."""
    monkeypatch.setenv("OMNI_TEST_RAW", str(tmp_path))
    worker, path = "tests.ranks.raw:serve", models.path("helios")
    found = []
    for sizes in ({}, {"ulysses_degree": 2, "vae_patch_parallel_size": 2}):
        make = functools.partial(RankExecutor, environments=[{}] * 2) if sizes else ProcessExecutor
        async with serving(path, make=functools.partial(make, worker=worker), **sizes) as served:
            job = served.submit(task=Task.TEXT_TO_VIDEO, width=96, height=32, steps=3, num_frames=66)
            assert (await served.ended(job)).failure is None
            found.append(np.load(tmp_path / f"{job.id}.npy").astype(int))
    alone, together = found
    assert alone.shape[0] > 33
    differ = np.abs(alone - together)
    assert differ.max() <= 1
    assert (differ > 0).mean() < 1e-3


async def test_a_job_over_ranks_tells_its_steps_and_can_be_cancelled(models: Models) -> None:
    alone = await models.pixels("qwen_image")
    async with serving(models.path("qwen_image"), ulysses_degree=2, warm_up_seconds=0.5) as served:
        job = served.submit(steps=200)
        beside = served.submit(steps=4)
        await until(lambda: events(job).count("StepProgress") >= 5)
        served.engine.cancel(job.id, "enough")
        await served.ended(job)
        assert job.state is JobState.CANCELLED
        assert events(await served.ended(beside))[:3] == ["Queued", "Started", "EncodeDone"]
        assert beside.failure is None
        ours = await made_by(served, "qwen_image")
        assert max(np.abs(mine - theirs).max() for mine, theirs in zip(ours, alone, strict=True)) <= 1
        for _ in range(8):
            # at whatever point: while it waits, in its prepare, in its first steps
            short = served.submit(steps=50)
            await asyncio.sleep(0.02)
            served.engine.cancel(short.id, "enough")
        last = await served.ended(served.submit())
        assert last.failure is None
        assert served.engine.stats().worker_restarts == 0


async def test_ranks_sleep_and_wake_together(models: Models) -> None:
    async with serving(models.path("qwen_image"), tensor_parallel_size=2) as served:
        before = await made_by(served, "qwen_image")
        for level in SleepLevel:
            await served.engine.sleep(level)
            await served.engine.wake()
            after = await made_by(served, "qwen_image")
            assert all(np.array_equal(mine, theirs) for mine, theirs in zip(before, after, strict=True))
        assert served.engine.stats().worker_restarts == 0
