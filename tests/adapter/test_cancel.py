"""Cancel in every phase: the caller hears of it at once, and the work ends at its next block."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, JobState, LocalExecutor, Submission
from omni_grpc.types.errors import OperationCancelled
from omni_grpc.types.events import Cancelled as CancelledEvent
from omni_grpc.types.events import Failed
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Draft
from omni_grpc.worker import delivery

from .conftest import equal

SMALL = {"width": 64, "height": 64}
ASKED = {**SMALL, "steps": 2, "seeds": (1,)}


class Door:
    """Holds up whoever comes to a module, and counts who comes to another one."""

    def __init__(self, held: torch.nn.Module, after: torch.nn.Module) -> None:
        self.came, self.opens = threading.Event(), threading.Event()
        self.passed = 0
        self._hooks = [held.register_forward_hook(self._hold), after.register_forward_hook(self._count)]

    def _hold(self, *_):
        self.came.set()
        assert self.opens.wait(20)

    def _count(self, *_):
        self.passed += 1

    def remove(self):
        for hook in self._hooks:
            hook.remove()


def encoder_door(pipeline) -> Door:
    layers = pipeline.text_encoder.encoder.layers
    return Door(layers[0], layers[-1])


def vae_door(pipeline) -> Door:
    return Door(pipeline.vae.decoder.up_blocks[0], pipeline.vae.decoder.up_blocks[-1])


def test_a_request_that_is_dropped_in_its_encode_ends_at_the_next_block(load):
    adapter = load("stable_diffusion")
    before = adapter.run(**ASKED).output
    door = encoder_door(adapter.pipeline)
    request = adapter.request(**ASKED)
    with ThreadPoolExecutor(1) as lane:
        prepared = lane.submit(adapter.runner.prepare, request)
        assert door.came.wait(20)
        adapter.runner.drop((request.id,))
        door.opens.set()
        with pytest.raises(OperationCancelled):
            prepared.result(20)
    assert door.passed == 0
    door.remove()
    assert equal(adapter.run(**ASKED).output, before)


def test_a_request_that_is_dropped_in_its_decode_ends_at_the_next_block(load):
    adapter = load("stable_diffusion")
    before = adapter.run(**ASKED).output
    door = vae_door(adapter.pipeline)
    request = adapter.request(**ASKED)
    adapter.runner.prepare(request)
    for _ in adapter.steps(request):
        pass
    with ThreadPoolExecutor(1) as lane:
        decoded = lane.submit(adapter.runner.decode, request.id)
        assert door.came.wait(20)
        adapter.runner.drop((request.id,))
        with pytest.raises(OperationCancelled):
            decoded.result(20)  # while the block is still at work
    door.opens.set()
    adapter.runner._last.join()
    assert door.passed == 0
    door.remove()
    assert equal(adapter.run(**ASKED).output, before)


def test_a_request_that_is_dropped_before_its_files_gets_none(load, monkeypatch):
    adapter = load("stable_diffusion")
    request = adapter.request(**ASKED, num_outputs=3)
    encoded, encode = [], delivery.encode

    def dropping(*arguments, **rates):
        encoded.append(1)
        adapter.runner.drop((request.id,))
        return encode(*arguments, **rates)

    monkeypatch.setattr(delivery, "encode", dropping)
    adapter.runner.prepare(request)
    for _ in adapter.steps(request):
        pass
    with pytest.raises(OperationCancelled, match="in its decode"):
        adapter.runner.decode(request.id)
    assert encoded == [1]


def test_a_vae_that_was_cast_for_a_decode_is_cast_back(load):
    adapter = load("stable_diffusion_xl", diffusers_load_kwargs={"dtype": "bfloat16"})
    adapter.pipeline.vae.to(torch.float32)
    request = adapter.request(**ASKED)
    adapter.runner.prepare(request)
    adapter.runner.drop((request.id,))
    adapter.runner._last.join()
    assert adapter.pipeline.vae.dtype is torch.bfloat16


@pytest.mark.parametrize("door", [encoder_door, vae_door])
@pytest.mark.parametrize("ending", ["cancel", "deadline"])
def test_the_caller_hears_of_it_while_the_worker_is_held_up(door, ending, tiny):
    config = EngineConfig.from_settings(model=str(tiny("stable_diffusion")), device="cpu", cpu_threads=1)
    checkpoint = open_checkpoint(tiny("stable_diffusion"), name="tiny")
    draft = Draft(model="tiny", prompt="a red cat", **SMALL, steps=2, seeds=(1,), output_format=ImageFormat.PNG)

    async def run():
        executor = LocalExecutor(config, checkpoint)
        engine = Engine(config, checkpoint, executor)
        await engine.start()

        async def ended(job):
            while not job.state.terminal:
                await job.wait(job.last_seq)
            return job

        solo = await ended(engine.submit(Submission(draft=draft))[0])
        held = door(executor._worker._runner._pipeline)
        timeout = 0.5 if ending == "deadline" else None
        job, _ = engine.submit(Submission(draft=draft, run_timeout=timeout))
        came = asyncio.create_task(asyncio.to_thread(held.came.wait, 20))
        await asyncio.wait({came, asyncio.create_task(ended(job))}, return_when=asyncio.FIRST_COMPLETED)
        held.came.set()  # where the time was over before it came so far
        if ending == "cancel":
            assert engine.cancel(job.id, "enough").state is JobState.CANCELLED
        await ended(job)
        last = job.entries[-1].event
        # the next one waits for the held up one to be gone, and is not spoilt by it
        following, _ = engine.submit(Submission(draft=draft))
        passed = held.passed
        held.opens.set()
        await asyncio.sleep(0)
        await ended(following)
        held.remove()
        files = [await engine.artifacts.data(one.artifacts[0].artifact_id) for one in (solo, following)]
        await engine.close()
        return last, passed, files

    last, passed, files = asyncio.run(run())
    assert isinstance(last, CancelledEvent if ending == "cancel" else Failed)
    if ending == "deadline":
        assert last.failure.reason == "RUN_TIMEOUT"
    assert passed == 0
    assert files[0] == files[1]
