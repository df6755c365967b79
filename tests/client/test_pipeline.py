"""A server that is called as a pipeline of diffusers is."""

import asyncio

import numpy as np
import pytest
import pytest_asyncio
import torch
from PIL import Image

from omni_grpc.client import Pipeline
from omni_grpc.types.errors import InvalidArgument, OperationCancelled
from omni_grpc.v1.event_pb2 import JOB_STATE_CANCELLED
from tests.server.studio import serving_studio


@pytest_asyncio.fixture
async def studio():
    async with serving_studio() as service:
        yield service


async def called(studio, *args, **kwargs):
    """What a pipeline makes of a call, on a thread as its users have it, and what the server was asked."""

    def call():
        with Pipeline(f"127.0.0.1:{studio.server.port}") as pipe:
            return pipe(*args, **kwargs)

    made = await asyncio.to_thread(call)
    return made, await studio.get(made.result.job_id)


async def test_arguments_of_diffusers_are_those_of_a_request(studio):
    made, job = await called(
        studio,
        "a red circle",
        negative_prompt="",
        num_inference_steps=3,
        width=64,
        height=32,
        true_cfg_scale=3.0,
        num_images_per_prompt=2,
        generator=torch.Generator().manual_seed(7),
    )
    assert [image.size for image in made.images] == [(64, 32)] * 2
    assert made.result.seeds == (7, 8)
    effective = made.result.effective
    assert (effective.steps, effective.guidance.true_cfg_scale) == (3, 3.0)
    assert job.job_id == made.result.job_id


async def test_arrays(studio):
    made, _ = await called(studio, "x", width=64, height=32, generator=3, output_type="np")
    assert (made.images.shape, made.images.dtype) == ((1, 32, 64, 3), np.float32)
    assert 0 <= made.images.min() <= made.images.max() <= 1
    assert made.result.seeds == (3,)


@pytest.mark.parametrize("images", [1, 2])
async def test_an_image_is_edited(studio, images):
    pictures = [Image.new("RGB", (32, 32), "red") for _ in range(images)]
    made, job = await called(studio, "x", image=pictures[0] if images == 1 else pictures, width=64, height=32)
    assert len(made.images) == 1
    assert job.task != 0


async def test_the_callback_comes_after_each_step(studio):
    seen = []

    def callback(pipe, step, timestep, kwargs):
        seen.append((type(pipe), step, type(timestep), len(kwargs["previews"])))
        return kwargs

    await called(studio, "x", num_inference_steps=3, callback_on_step_end=callback)
    steps = [step for _, step, *_ in seen]
    assert steps[-1] == 2
    assert steps == sorted(set(steps))
    assert {kind for kind, *_ in seen} == {Pipeline}


async def test_a_callback_that_interrupts_cancels_the_job(studio):
    def callback(pipe, step, timestep, kwargs):
        pipe._interrupt = True
        return kwargs

    with pytest.raises(OperationCancelled) as caught:
        await called(studio, "x", num_inference_steps=50, callback_on_step_end=callback)
    job = await studio.get(caught.value.failure.metadata["job_id"])
    assert job.state == JOB_STATE_CANCELLED


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"latents": 1}, "latents"), ({"prompt_embeds": 1}, "prompt_embeds"), ({"output_type": "latent"}, "output_type")],
)
async def test_what_no_server_can_have_is_refused_by_name(studio, arguments, field):
    with pytest.raises(InvalidArgument) as caught:
        await called(studio, "x", **arguments)
    assert [violation.field for violation in caught.value.violations] == [field]
