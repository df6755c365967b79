"""Offline use, and that it gives what the server's worker gives."""

import asyncio
import dataclasses

import numpy as np
import PIL.Image
import pytest

from omni_grpc import InvalidArgument, NotFound, Omni
from omni_grpc import omni as omni_module
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig, sections
from omni_grpc.engine import Engine, ProcessExecutor, Submission
from omni_grpc.metadata import parameters_in
from omni_grpc.types.errors import CheckpointError, ConfigError
from omni_grpc.types.events import Cancelled, Completed, StepProgress
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.parameters import Parameters
from omni_grpc.types.request import Draft, GuidanceDraft

DRAFT = Draft(
    model="tiny",
    prompt="a red circle",
    negative_prompt="",
    width=48,
    height=32,
    steps=3,
    seeds=(11,),
    num_outputs=2,
    guidance=GuidanceDraft(true_cfg_scale=2.0),
    output_format=ImageFormat.RAW_RGB8,
)


@pytest.fixture(scope="module")
def omni(tiny_qwen_image):
    with Omni(str(tiny_qwen_image), served_model_name="tiny", device="cpu", cpu_threads=1) as omni:
        yield omni


def test_generate_returns_images_and_the_truth_about_them(omni):
    result = omni.generate("a red circle", width=48, height=32, steps=2, seed=0)
    assert [image.size for image in result.images] == [(48, 32)]
    assert result.seeds == (0,)
    assert (result.effective.steps, result.effective.evals) == (2, 2)
    assert result.effective.scheduler == "FlowMatchEulerDiscreteScheduler"
    assert result.stats.steps_run == 2
    again = omni.generate("a red circle", width=48, height=32, steps=2, seed=0)
    assert result.files == again.files
    assert omni.generate("a red circle", width=48, height=32, steps=2, seed=1).files != result.files


def test_outputs_are_saved_with_their_parameters(omni, tmp_path):
    made = omni.generate("a red circle", negative_prompt="blur", width=48, height=32, steps=2, seeds=(5, 9))
    paths = made.save(tmp_path)
    assert [path.name for path in paths] == ["00001-5.png", "00001-9.png"]
    found = parameters_in(paths[1])
    assert (found.asked.prompt, found.asked.model, found.seed) == ("a red circle", omni.checkpoint.name, 9)
    again = omni.generate(found.asked.prompt, **found.again()).images[0]
    assert again.tobytes() == made.images[1].tobytes() == PIL.Image.open(paths[1]).tobytes()
    assert made.save(tmp_path / "a.png", metadata=False)[0].read_bytes() == made.files[0]


def test_the_worker_writes_the_parameters_that_the_result_has(omni, tmp_path):
    options = {"negative_prompt": "blur", "true_cfg_scale": 2.0, "width": 48, "height": 32, "steps": 3, "seeds": (5, 9)}
    made = omni.generate("a red circle", **options, embed_parameters=True)
    assert made.asked.options == options
    for index, path in enumerate(made.save(tmp_path)):
        assert path.read_bytes() == made.files[index], "the client does not write them again"
        written = dataclasses.replace(made.asked, options=options | {"seeds": [5, 9]})
        assert parameters_in(path) == Parameters.of(
            written, made.effective, seed=(5, 9)[index], index=index, layer=None
        )
    assert made.images[0].tobytes() == omni.generate("a red circle", **options).images[0].tobytes()


def test_parameters_have_no_place_in_raw_pixels(omni):
    with pytest.raises(InvalidArgument, match=r"options\.embed_parameters"):
        omni.generate("x", output_format="RAW_RGB8", embed_parameters=True)


def test_without_a_model_the_bundled_one_is_loaded(tiny_qwen_image, monkeypatch):
    monkeypatch.setattr(sections, "BUNDLED", tiny_qwen_image)
    with Omni(device="cpu", cpu_threads=1, warm_up_seconds=0) as omni:
        assert omni.checkpoint.path == tiny_qwen_image


def test_a_drawn_seed_is_reported_and_makes_the_same_image(omni):
    drawn = omni.generate("a star", width=32, height=32, steps=1)
    assert omni.generate("a star", width=32, height=32, steps=1, seed=drawn.seeds[0]).files == drawn.files


def test_a_worker_process_gives_the_same_bits(omni, tiny_qwen_image):
    config = EngineConfig.from_settings(model=str(tiny_qwen_image), device="cpu", cpu_threads=1)
    checkpoint = open_checkpoint(tiny_qwen_image, name="tiny")

    async def run():
        engine = Engine(config, checkpoint, ProcessExecutor(config, checkpoint))
        await engine.start()
        job, _ = engine.submit(Submission(draft=DRAFT))
        seq = 0
        while not job.state.terminal:
            await job.wait(seq)
            seq = job.last_seq
        files = [await engine.artifacts.data(artifact.artifact_id) for artifact in job.artifacts]
        await engine.close()
        return job, files

    job, files = asyncio.run(run())
    local = omni.run(DRAFT)
    assert job.effective == local.effective
    assert [file == other for file, other in zip(files, local.files, strict=True)] == [True, True]
    assert np.array_equal(np.asarray(local.images[0]).ravel(), np.frombuffer(files[0], np.uint8))


def test_stream_gives_every_event_in_order(omni):
    events = list(omni.stream(DRAFT))
    steps = [event.step for event in events if isinstance(event, StepProgress)]
    assert steps == [1, 2, 3]
    assert isinstance(events[-1], Completed)


def test_leaving_a_stream_cancels_the_generation(omni):
    stream = omni.stream(Draft(model="tiny", prompt="x", width=32, height=32, steps=200))
    for event in stream:
        if isinstance(event, StepProgress):
            break
    stream.close()
    job = omni._engine.jobs.newest()[0]
    assert isinstance(job.entries[-1].event, Cancelled)
    assert omni.generate("next", width=32, height=32, steps=1).files


def test_refusals_are_raised_before_any_work(omni):
    with pytest.raises(InvalidArgument, match="not a multiple of 16"):
        omni.generate("x", width=20)
    with pytest.raises(InvalidArgument, match="has no 'Heun'; it has FlowMatchEulerDiscreteScheduler"):
        omni.generate("x", scheduler="Heun")
    with pytest.raises(InvalidArgument, match="both set"):
        omni.generate("x", seed=1, seeds=(1, 2))
    with pytest.raises(NotFound):
        omni.run(Draft(model="other", prompt="x"))


@pytest.mark.parametrize("prompt", [["a", "b"], 5, b"a", {}])
def test_a_prompt_that_is_no_text_is_refused_by_its_field(omni, prompt):
    with pytest.raises(InvalidArgument) as caught:
        omni.generate(prompt, width=32, height=32, steps=1)
    assert str(caught.value) == f"prompt is {prompt!r}, expected text"
    assert [violation.field for violation in caught.value.violations] == ["prompt"]


def test_numbers_of_numpy_are_taken(omni):
    made = omni.generate("a", seed=np.int64(5), width=np.int32(32), height=np.uint16(32), steps=np.int8(1))
    assert (made.seeds, made.effective.width) == ((5,), 32)


def test_bad_settings_and_checkpoints_fail_at_once(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'max_queue'"):
        Omni(str(tmp_path), max_qeue=1)
    with pytest.raises(CheckpointError, match=r"model_index\.json"):
        Omni(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        option.name
        for option in sections.options()
        if option.section in omni_module.ABOUT_SERVERS or option.name in omni_module.OF_SERVERS
    ],
)
def test_a_setting_about_callers_is_refused_for_nobody_calls(name):
    with pytest.raises(ConfigError, match=f"{name}: no effect without a server") as refused:
        Omni(**{name: None})
    assert [violation.field for violation in refused.value.violations] == [name]


@pytest.mark.parametrize(("name", "value"), [("devices", ["0"]), ("rank_timeout", 5.0)])
def test_a_setting_of_several_processes_is_refused_for_one(name, value):
    with pytest.raises(ConfigError, match=f"{name} has no effect on one process; .*ulysses_degree=2") as refused:
        Omni(**{name: value})
    assert [violation.field for violation in refused.value.violations] == [name]


def test_ranks_that_a_model_cannot_have_are_refused_before_any_process(tiny_qwen_image):
    with pytest.raises(ConfigError, match="--ulysses-degree is 3, which") as refused:
        Omni(str(tiny_qwen_image), device="cpu", ulysses_degree=3)
    assert [violation.field for violation in refused.value.violations] == ["ulysses_degree"]
