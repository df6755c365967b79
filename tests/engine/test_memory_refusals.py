"""What does not fit in memory is refused before there is a job, and told what would fit."""

import asyncio
import dataclasses

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.resolve.memory_fit import check_memory
from omni_grpc.types.errors import Code, ResourceExhausted
from omni_grpc.types.events import Failed
from omni_grpc.types.media import ImageInput, Inputs
from omni_grpc.types.memory_model import HeldLaw, MemoryModel, PixelLaw, StepLaw
from omni_grpc.types.spec import Limits
from tests.engine.manual import READY, ManualExecutor, ask, names, run_through
from tests.engine.simulation import BASE
from tests.toy import toy_checkpoint

GIB = 2**30
MEMORY = MemoryModel(
    capacity=10 * GIB,
    row=PixelLaw(fixed=10, area=1 / 256),
    step=StepLaw(token=4 * 2**20),
    held=HeldLaw(token=2**16),
    decode=PixelLaw(area=20_000),
)
LIMITS = Limits(
    size_multiple=16, min_size=16, max_size=4096, max_pixels=4096**2, max_prompt_tokens=9, max_frames=81,
    frame_multiple=4, frame_offset=1,
)  # fmt: skip


async def engine_with(memory):
    executor = ManualExecutor()
    engine = Engine(EngineConfig.from_settings(model="toy"), toy_checkpoint(), executor)
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    executor.deliver(dataclasses.replace(READY, memory=memory))
    await starting
    return engine, executor


def refused(request, memory=MEMORY, limits=LIMITS):
    with pytest.raises(ResourceExhausted) as caught:
        check_memory(request, memory, limits)
    assert caught.value.failure.reason == "MEMORY_PREDICTED"
    assert not caught.value.failure.retryable
    return {one.field: one.description for one in caught.value.violations}


@pytest.mark.parametrize(("width", "height"), [(2048, 1024), (1024, 2048), (1536, 1536), (4096, 64)])
def test_the_size_that_is_named_fits_and_the_next_larger_does_not(width, height):
    request = dataclasses.replace(BASE, width=width, height=height)
    memory = dataclasses.replace(MEMORY, capacity=MEMORY.need(request).alone * 0.6)
    found = refused(request, memory)
    assert found["width"] == found["height"]
    w, h = map(int, found["width"].removeprefix("the same shape fits as ").split(" x "))
    check_memory(dataclasses.replace(request, width=w, height=h), memory, LIMITS)
    assert w % 16 == h % 16 == 0
    assert w / h == pytest.approx(width / height, rel=0.2)
    larger = dataclasses.replace(
        request, width=w + 16 * max(1, width // height), height=h + 16 * max(1, height // width)
    )
    refused(larger, memory)


def test_fewer_frames_and_outputs_are_named_where_they_would_do():
    video = dataclasses.replace(BASE, width=512, height=512, num_frames=81, num_outputs=3, seeds=(1, 2, 3))
    model = dataclasses.replace(MEMORY, row=PixelLaw(volume=1 / 1024), decode=PixelLaw(volume=600))
    one = model.need(dataclasses.replace(video, num_outputs=1, seeds=(1,)))
    found = refused(video, dataclasses.replace(model, capacity=2.5 * one.alone))
    assert found["sampling.num_outputs"] == "2 of the 3 outputs fit"
    assert found["num_frames"].endswith("of the 81 frames fit")
    assert int(found["num_frames"].split()[0]) % 4 == 1
    assert list(refused(video, dataclasses.replace(model, capacity=0.01 * one.alone))) == ["width", "height"]


def test_where_nothing_fits_the_refusal_says_so():
    with pytest.raises(ResourceExhausted, match="not even the smallest size would"):
        check_memory(BASE, dataclasses.replace(MEMORY, capacity=1.0), LIMITS)


def test_what_an_edit_reads_counts_too():
    picture = ImageInput(4096, 4096, 3, b"")
    model = dataclasses.replace(MEMORY, encode=PixelLaw(area=1000))
    edit = dataclasses.replace(BASE, inputs=Inputs(images=(picture,)))
    assert model.need(edit).prepare - model.need(BASE).prepare > 1000 * 4096**2


async def test_an_engine_refuses_before_there_is_a_job():
    engine, _ = await engine_with(dataclasses.replace(MEMORY, capacity=GIB))
    with pytest.raises(ResourceExhausted) as caught:
        ask(engine, width=512, height=512)
    assert caught.value.failure.reason == "MEMORY_PREDICTED"
    assert "predicted to need" in str(caught.value)
    assert len(engine.jobs) == 0
    job = ask(engine, width=128, height=128, negative_prompt=None)
    assert not job.ended
    await engine.close()


async def test_a_job_whose_rows_turn_out_too_long_fails_before_its_first_step():
    engine, worker = await engine_with(MEMORY)
    job, other = ask(engine, width=128, height=128), ask(engine, width=128, height=128)
    worker.prepared(job.id, rows=(10_000,))
    assert names(job)[-1] == "Failed"
    failed = job.entries[-1].event
    assert isinstance(failed, Failed)
    assert (failed.failure.code, failed.failure.reason) == (Code.RESOURCE_EXHAUSTED, "MEMORY_PREDICTED")
    assert job.id in worker.last.drop
    run_through(worker, other)
    assert names(other)[-1] == "Completed"
    await engine.close()
