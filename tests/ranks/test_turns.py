"""Jobs that leave or make way in the middle of a phase: the ranks stay in step, and what comes next is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from omni_grpc.engine import JobState
from tests.ranks.group import events, serving, until
from tests.ranks.test_deaths import WORKER, go_on, pauses

__all__ = ["pauses"]


async def test_a_job_that_is_cancelled_in_any_phase_leaves_the_ranks_in_step(
    tiny_qwen_image: Path, pauses: Path
) -> None:
    """Also where one of the ranks is done with that phase and the other one is still in it."""
    settings = {"ulysses_degree": 2, "vae_patch_parallel_size": 2, "max_num_seqs": 2}
    async with serving(tiny_qwen_image, worker=WORKER, **settings) as served:
        beside = served.submit("a blue square", seeds=(3,))
        (expected,), (other,) = await served.pixels(served.submit()), await served.pixels(beside)
        for phase in ("prepare", "step", "decode"):
            for late in ("0", "1", ""):
                (pauses / phase).write_text(late)
                job = served.submit()
                await until((pauses / f"{phase}.{late or '0'}").exists)
                served.engine.cancel(job.id, "enough")
                # what was cancelled is over at once, and the next jobs come while the ranks are still at it
                after, second = served.submit(), served.submit("a blue square", seeds=(3,))
                await served.ended(job)
                go_on(pauses)
                assert job.state is JobState.CANCELLED
                # one alone and both together may be rounded otherwise
                for made, alone in ((await served.pixels(after), expected), (await served.pixels(second), other)):
                    assert np.abs(made[0] - alone).max() <= 1
        assert served.engine.stats().worker_restarts == 0


async def test_a_job_that_makes_way_ends_with_the_pixels_of_one_that_does_not(tiny_qwen_image: Path) -> None:
    """Both take their steps alone, so they are the same bit for bit."""
    settings = {"tensor_parallel_size": 2, "cfg_parallel_size": 2, "policy": "priority", "max_num_seqs": 1}
    async with serving(tiny_qwen_image, **settings) as served:
        low = {"steps": 40, "seeds": (5,), "width": 96, "negative_prompt": "dots"}
        undisturbed = await served.pixels(served.submit(**low))
        urgent = await served.pixels(served.submit(seeds=(6,)))
        disturbed = served.submit(**low)
        for _ in range(2):
            seen = events(disturbed).count("StepProgress")
            await until(lambda seen=seen: events(disturbed).count("StepProgress") > seen + 2)
            quick = served.submit(seeds=(6,), priority=1)
            assert np.array_equal(await served.pixels(quick), urgent)
            assert disturbed.state is not JobState.SUCCEEDED
        assert np.array_equal(await served.pixels(disturbed), undisturbed)
        assert events(disturbed).count("Preempted") == 2
        assert served.engine.stats().worker_restarts == 0
