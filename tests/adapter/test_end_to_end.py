"""The adapter under the engine: offline, beside the native model, and in a worker process."""

from __future__ import annotations

import asyncio
import io
import json
import shutil

import av
import numpy as np
import PIL.Image
import pytest

from omni_grpc import Omni
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, JobState, ProcessExecutor, Submission
from omni_grpc.types.errors import ConfigError, FailedPrecondition
from omni_grpc.types.events import Cancelled, StepProgress
from omni_grpc.types.media import AudioFormat, ImageFormat, ImageInput, Inputs, VideoFormat
from omni_grpc.types.request import Draft, GuidanceDraft, Task
from tests.ops.attention_cases import ON_CPU

SETTINGS = {"device": "cpu", "cpu_threads": 1, "served_model_name": "tiny"}
SMALL = {"model": "tiny", "prompt": "a red cat", "width": 64, "height": 64}


def test_a_native_checkpoint_goes_through_the_adapter_too(tiny):
    draft = Draft(
        **SMALL,
        negative_prompt=" ",
        steps=3,
        seeds=(3,),
        guidance=GuidanceDraft(true_cfg_scale=4.0),
        output_format=ImageFormat.RAW_RGB8,
    )
    with Omni(str(tiny("qwen_image")), diffusion_load_format="diffusers", **SETTINGS) as omni:
        events = []
        adapted = omni.run(draft, events.append)
    with Omni(str(tiny("qwen_image")), **SETTINGS) as omni:
        native = omni.run(draft)
    assert [(event.step, event.total_steps) for event in events if isinstance(event, StepProgress)] == [
        (1, 3),
        (2, 3),
        (3, 3),
    ]
    pixels = [np.frombuffer(result.files[0], np.uint8).astype(int) for result in (adapted, native)]
    assert np.abs(pixels[0] - pixels[1]).max() <= 1
    assert (adapted.effective.attention_backend, native.effective.attention_backend) == ("native", ON_CPU)
    assert adapted.effective.scheduler == "FlowMatchEulerDiscreteScheduler"


def test_settings_without_effect_are_refused_before_anything_is_loaded(tiny):
    with pytest.raises(ConfigError, match="which is native"):
        Omni(str(tiny("qwen_image")), boundary_ratio=0.5, **SETTINGS)


def test_pixels_and_sound_come_as_files(tiny):
    gradient = np.linspace(0, 255, 64 * 64 * 3).astype(np.uint8)
    first = ImageInput(64, 64, 3, gradient.tobytes())
    with Omni(str(tiny("wan_i2v")), diffusion_load_format="diffusers", **SETTINGS) as omni:
        video = omni.run(
            Draft(
                **SMALL,
                task=Task.IMAGE_TO_VIDEO,
                inputs=Inputs(first_frame=first),
                num_frames=5,
                steps=2,
                output_fps=12.5,
                output_format=VideoFormat.MP4,
            )
        )
    with av.open(io.BytesIO(video.files[0])) as file:
        stream = file.streams.video[0]
        assert (stream.width, stream.height, float(stream.average_rate)) == (64, 64, 12.5)
        assert sum(1 for _ in file.decode(stream)) == 5
    assert (video.effective.num_frames, video.effective.output_fps) == (5, 12.5)

    with Omni(str(tiny("stable_audio")), **SETTINGS) as omni:
        sound = omni.run(
            Draft(
                model="tiny",
                prompt="rain",
                task=Task.TEXT_TO_AUDIO,
                duration=0.5,
                start=0.25,
                steps=3,
                output_format=AudioFormat.WAV,
            )
        )
    with av.open(io.BytesIO(sound.files[0])) as file:
        stream = file.streams.audio[0]
        assert (stream.rate, stream.channels) == (8000, 2)
        assert sum(frame.samples for frame in file.decode(stream)) == 4000
    assert sound.effective.duration == 0.5


def test_a_pipeline_that_cannot_be_served_is_named(tiny, tmp_path):
    shutil.copytree(tiny("stable_diffusion"), tmp_path / "other")
    index = tmp_path / "other" / "model_index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    index.write_text(json.dumps({**content, "_class_name": "MadeUpPipeline"}), encoding="utf-8")
    with pytest.raises(FailedPrecondition, match="'MadeUpPipeline'"):
        Omni(str(tmp_path / "other"), **SETTINGS)


@pytest.mark.timeout(120)
def test_jobs_in_a_worker_process_take_turns_and_cancel(tiny):
    config = EngineConfig.from_settings(model=str(tiny("flux")), diffusion_load_format="diffusers", **SETTINGS)
    checkpoint = open_checkpoint(tiny("flux"), name="tiny", load_format="diffusers")
    one = Draft(**SMALL, steps=3, seeds=(1,), output_format=ImageFormat.PNG)
    two = Draft(**{**SMALL, "width": 96, "prompt": "a blue robot"}, steps=2, seeds=(2,))

    async def run():
        engine = Engine(config, checkpoint, ProcessExecutor(config, checkpoint))
        await engine.start()

        async def ended(*drafts):
            jobs = [engine.submit(Submission(draft=draft))[0] for draft in drafts]
            for job in jobs:
                seq = 0
                while not job.state.terminal:
                    await job.wait(seq)
                    seq = job.last_seq
            assert [job.state for job in jobs] == [JobState.SUCCEEDED] * len(jobs)
            return [await engine.artifacts.data(job.artifacts[0].artifact_id) for job in jobs]

        solo = [*await ended(one), *await ended(two)]
        long = Draft(**SMALL, steps=200)
        job, _ = engine.submit(Submission(draft=long))
        while job.step < 2:
            await job.wait(job.last_seq)
        together = asyncio.create_task(ended(one, two))
        await asyncio.sleep(0)
        engine.cancel(job.id, "enough")
        made = await together
        last = job.entries[-1].event
        await engine.close()
        return solo, made, last

    solo, together, last = asyncio.run(run())
    assert together == solo
    assert isinstance(last, Cancelled)
    assert 2 <= last.completed_steps < 200
    assert PIL.Image.open(io.BytesIO(solo[1])).size == (96, 64)
