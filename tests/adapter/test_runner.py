"""The adapter gives what plain diffusers gives, bit for bit, with events, cancel and nothing left behind."""

from __future__ import annotations

import inspect

import numpy as np
import PIL.Image
import pytest
import torch

from omni_grpc.metadata import has_parameters, parameters_in
from omni_grpc.types.errors import FailedPrecondition, InternalError, InvalidArgument, OperationCancelled
from omni_grpc.types.media import ImageFormat, ImageInput, Inputs
from omni_grpc.types.request import GuidanceDraft, Task

from .conftest import GRADIENT, check_steps, equal, refused

PICTURE = ImageInput(64, 64, 3, GRADIENT.tobytes())
PIL_PICTURE = PIL.Image.fromarray(GRADIENT)
MASK = np.pad(np.full((32, 32), 255, np.uint8), 16)
MASK_INPUT = ImageInput(64, 64, 1, MASK.tobytes())
SMALL = {"width": 64, "height": 64}
SHORT = {**SMALL, "num_frames": 5}

# name -> what is asked of the adapter, and the same as arguments of diffusers
CASES = {
    "stable_diffusion": (
        {**SMALL, "negative_prompt": "blurry", "guidance": GuidanceDraft(scale=4.0)},
        {**SMALL, "negative_prompt": "blurry", "guidance_scale": 4.0},
    ),
    "stable_diffusion_img2img": (
        {"inputs": Inputs(images=(PICTURE,)), "strength": 0.7},
        {"image": PIL_PICTURE, "strength": 0.7},
    ),
    "stable_diffusion_inpaint": (
        {**SMALL, "inputs": Inputs(images=(PICTURE,), mask=MASK_INPUT), "strength": 0.9},
        {**SMALL, "image": PIL_PICTURE, "mask_image": PIL.Image.fromarray(MASK), "strength": 0.9},
    ),
    "stable_diffusion_xl": ({**SMALL, "guidance": GuidanceDraft(scale=6.0)}, {**SMALL, "guidance_scale": 6.0}),
    "flux": (
        {**SMALL, "negative_prompt": "blurry", "guidance": GuidanceDraft(scale=3.0, true_cfg_scale=2.0)},
        {**SMALL, "negative_prompt": "blurry", "guidance_scale": 3.0, "true_cfg_scale": 2.0},
    ),
    "qwen_image": (
        {**SMALL, "negative_prompt": " ", "guidance": GuidanceDraft(true_cfg_scale=4.0)},
        {**SMALL, "negative_prompt": " ", "true_cfg_scale": 4.0},
    ),
    "z_image": ({**SMALL, "guidance": GuidanceDraft(scale=1.0)}, {**SMALL, "guidance_scale": 1.0}),
    "wan_t2v": (
        {**SHORT, "negative_prompt": "static", "guidance": GuidanceDraft(scale_low_noise=3.0)},
        {**SHORT, "negative_prompt": "static", "guidance_scale_2": 3.0},
    ),
    "wan_i2v": (
        {**SHORT, "inputs": Inputs(first_frame=PICTURE, last_frame=PICTURE)},
        {**SHORT, "image": PIL_PICTURE, "last_image": PIL_PICTURE},
    ),
    "ltx": ({**SMALL, "num_frames": 9, "fps": 24.0}, {**SMALL, "num_frames": 9, "frame_rate": 24.0}),
    "stable_audio": (
        {"duration": 1.0, "negative_prompt": "noise"},
        {"audio_end_in_s": 1.0, "negative_prompt": "noise"},
    ),
}
TASKS = {
    "stable_diffusion_img2img": Task.IMAGE_TO_IMAGE,
    "stable_diffusion_inpaint": Task.INPAINT,
    "wan_t2v": Task.TEXT_TO_VIDEO,
    "wan_i2v": Task.IMAGE_TO_VIDEO,
    "ltx": Task.TEXT_TO_VIDEO,
    "stable_audio": Task.TEXT_TO_AUDIO,
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_arguments_give_the_same_bits(name, load, plain):
    asked, arguments = CASES[name]
    adapter = load(name)
    assert adapter.checkpoint.spec.tasks == (TASKS.get(name, Task.TEXT_TO_IMAGE),)
    direct = plain(name, like=adapter, seeds=(3,), num_inference_steps=4, output_type="np", **arguments)
    ran = adapter.run(**asked, steps=4, seeds=(3,))
    assert equal(ran.output, direct)
    assert np.isfinite(np.asarray(direct)).all()
    assert np.asarray(direct).std() > 1e-3
    check_steps(ran)


def test_steps_are_counted_as_the_pipeline_takes_them(load):
    assert len(load("stable_diffusion").run(**SMALL, steps=4).progress) == 5  # PNDM takes its first step twice
    img2img = load("stable_diffusion_img2img")
    assert len(img2img.run(inputs=Inputs(images=(PICTURE,)), strength=0.5, steps=6).progress) == 4


def test_the_loops_of_a_combined_pipeline_are_counted_together(load, plain):
    adapter = load("kandinsky")
    direct = plain(
        "kandinsky", like=adapter, seeds=(3,), num_inference_steps=4, prior_num_inference_steps=3, output_type="np",
        negative_prompt="blurry", **SMALL
    )  # fmt: skip
    asked = {**SMALL, "negative_prompt": "blurry", "extra": {"prior_num_inference_steps": 3}, "steps": 4, "seeds": (3,)}
    ran = adapter.run(**asked)
    assert equal(ran.output, direct)
    check_steps(ran)
    assert [progress.total for progress in ran.progress] == [7] * 7
    # dropped in either loop
    for steps in (2, 5):
        dropped = adapter.request(**asked, prompt="a blue robot")
        adapter.runner.prepare(dropped)
        for _ in range(steps):
            adapter.runner.step((dropped.id,))
        adapter.runner.drop((dropped.id,))
        assert equal(adapter.run(**asked).output, direct)


def test_a_scheduler_that_predicts_twice_has_all_its_steps(load):
    from diffusers import HeunDiscreteScheduler

    adapter = load("stable_diffusion")
    adapter.pipeline.scheduler = HeunDiscreteScheduler.from_config(adapter.pipeline.scheduler.config)
    adapter.runner._schedulers[:] = [adapter.pipeline.scheduler]
    ran = adapter.run(**SMALL, steps=4)
    assert [progress.total for progress in ran.progress] == [7] * 7


@pytest.mark.parametrize("name", ["stable_diffusion", "flux", "wan_t2v", "stable_audio"])
def test_a_cancelled_and_a_failed_run_leave_nothing_behind(name, load, monkeypatch):
    asked = CASES[name][0]
    adapter = load(name)
    first = adapter.run(**asked, steps=4, seeds=(3,))

    cancelled = adapter.request(**{**asked, "prompt": "a blue robot"}, steps=6, seeds=(9,))
    adapter.runner.prepare(cancelled)
    adapter.runner.step((cancelled.id,))
    adapter.runner.drop((cancelled.id,))
    with pytest.raises(OperationCancelled):
        adapter.runner.decode(cancelled.id)
    assert equal(adapter.run(**asked, steps=4, seeds=(3,)).output, first.output)

    kind = type(adapter.pipeline.scheduler)
    original, calls = kind.step, []

    def failing(self, model_output, timestep, sample, *args, **kwargs):
        calls.append(timestep)
        if len(calls) == 3:
            raise RuntimeError("made to fail")
        return original(self, model_output, timestep, sample, *args, **kwargs)

    failing.__signature__ = inspect.signature(original)
    monkeypatch.setattr(kind, "step", failing)
    with pytest.raises(InternalError, match="made to fail"):
        adapter.run(**asked, steps=6, seeds=(9,))
    monkeypatch.undo()
    assert len(calls) == 3
    assert equal(adapter.run(**asked, steps=4, seeds=(3,)).output, first.output)


def test_requests_of_other_sizes_and_steps_do_not_touch_each_other(load):
    one = {"width": 64, "height": 64, "steps": 4, "seeds": (1,)}
    two = {"width": 96, "height": 32, "steps": 3, "seeds": (2,), "prompt": "a blue robot"}
    solo = [load("flux").run(**fields).output for fields in (one, two)]
    adapter = load("flux")
    together = [adapter.run(**fields).output for fields in (one, two, one)]
    assert equal(together[0], solo[0])
    assert equal(together[1], solo[1])
    assert equal(together[2], solo[0])


def test_the_next_request_waits_for_the_end_of_a_dropped_one(load):
    adapter = load("flux")
    solo = adapter.run(**SMALL, steps=3, seeds=(1,)).output
    dropped = adapter.request(**SMALL, steps=5)
    adapter.runner.prepare(dropped)
    adapter.runner.drop((dropped.id,))
    assert equal(adapter.run(**SMALL, steps=3, seeds=(1,)).output, solo)
    assert adapter.runner.step((dropped.id,)).progress == ()


def test_each_output_has_its_own_seed(load, plain):
    adapter = load("flux")
    direct = plain(
        "flux", like=adapter, seeds=(5, 6), num_images_per_prompt=2, num_inference_steps=3, output_type="np", **SMALL
    )
    ran = adapter.run(**SMALL, steps=3, seeds=(5,), num_outputs=2, output_format=ImageFormat.RAW_RGB8)
    assert equal(ran.output, direct)
    assert [media.seed for media in ran.decoded.media] == [5, 6]
    assert ran.files == [(image * 255).round().astype(np.uint8).tobytes() for image in direct]


def test_what_the_pipeline_rounds_is_said(load):
    ran = load("flux").run(width=72, height=64, steps=2)
    warning = ran.warnings["SIZE_ROUNDED"]
    assert (warning.requested, warning.applied) == ("72 x 64", "64 x 64")
    assert (ran.decoded.media[0].width, ran.decoded.media[0].height) == (64, 64)
    assert load("flux").run(**SMALL, steps=2).warnings == {}


def test_a_picture_is_brought_to_the_size_where_the_pipeline_takes_none(load):
    ran = load("stable_diffusion_img2img").run(inputs=Inputs(images=(PICTURE,)), width=32, height=48, steps=4)
    assert (ran.decoded.media[0].width, ran.decoded.media[0].height) == (32, 48)


def test_what_the_pipeline_itself_refuses_is_the_callers_to_fix(load):
    with pytest.raises(InvalidArgument, match="divisible by 16"):
        load("wan_t2v").run(width=72, height=64, num_frames=5, steps=2)
    with pytest.raises(InvalidArgument, match="nearest valid value: 9"):
        load("wan_t2v").run(**SMALL, num_frames=8, steps=2)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"clip_skp": 1}, "did you mean 'clip_skip'"),
        ({"output_type": "latent"}, "set by the adapter"),
        ({"guidance_rescale": 0.5}, r"has a field of its own: sampling\.guidance\.rescale"),
        ({"guidance_scale": 3.0}, r"has a field of its own: sampling\.guidance\.scale"),
        # the pipeline has **kwargs that would swallow it
        ({"true_cfg_scale": 3.0}, "is no parameter of StableDiffusionPipeline"),
    ],
)
def test_extra_parameters_are_those_of_the_signature(extra, message, load):
    with pytest.raises(InvalidArgument, match=message) as caught:
        load("stable_diffusion").run(**SMALL, steps=2, extra=extra)
    assert refused(caught.value) == {f"extra.{next(iter(extra))}"}


def test_an_extra_parameter_has_its_effect(load, plain):
    adapter = load("flux")
    short = plain("flux", like=adapter, num_inference_steps=3, max_sequence_length=16, output_type="np", **SMALL)
    fields = {**SMALL, "steps": 3, "seeds": (0,)}
    assert equal(adapter.run(**fields, extra={"max_sequence_length": 16}).output, short)
    assert not equal(adapter.run(**fields).output, short)


def test_embeddings_take_the_place_of_the_prompt(load):
    adapter = load("stable_diffusion")
    fields = {**SMALL, "steps": 3, "seeds": (0,)}
    embeds, _ = adapter.pipeline.encode_prompt("a blue robot", "cpu", 1, False)
    ran = adapter.run(**fields, prompt="not looked at", extra={"prompt_embeds": embeds.detach()})
    assert equal(ran.output, adapter.run(**fields, prompt="a blue robot").output)
    assert ran.warnings["PROMPT_WITHOUT_EFFECT"].field == "prompt"
    with pytest.raises(InvalidArgument, match="only a caller in Python"):
        adapter.run(**fields, extra={"prompt_embeds": [[0.0]]})


def test_whole_numbers_may_come_as_floats(load):
    adapter = load("flux")
    fields = {**SMALL, "steps": 2, "seeds": (0,)}
    outputs = [adapter.run(**fields, extra={"max_sequence_length": value}).output for value in (16, 16.0)]
    assert equal(*outputs)


def test_rescale_goes_with_one_scale_for_all(load, plain):
    adapter = load("stable_diffusion")
    arguments = {**SMALL, "num_inference_steps": 3, "guidance_rescale": 0.5, "output_type": "np"}
    direct = plain("stable_diffusion", like=adapter, **arguments)
    fields = {**SMALL, "steps": 3, "seeds": (0,)}
    assert equal(adapter.run(**fields, guidance=GuidanceDraft(rescale=0.5)).output, direct)
    assert not equal(adapter.run(**fields).output, direct)


def test_inputs_and_tasks_that_it_lacks_are_refused(load):
    adapter = load("flux")
    with pytest.raises(InvalidArgument, match="is not supported by"):
        adapter.request(inputs=Inputs(images=(PICTURE,)))
    with pytest.raises(FailedPrecondition, match="does not support IMAGE_EDIT"):
        adapter.request(task=Task.IMAGE_EDIT)


def test_it_steps_with_the_scheduler_that_was_loaded_and_refuses_others(load):
    adapter = load("flux")
    own = "FlowMatchEulerDiscreteScheduler"
    assert adapter.checkpoint.schedulers == (own,)
    assert adapter.request(scheduler=own).scheduler == own
    with pytest.raises(
        InvalidArgument, match=f"FluxPipeline has no 'FlowMatchHeunDiscreteScheduler'; it has {own}"
    ) as no:
        adapter.request(scheduler="FlowMatchHeunDiscreteScheduler")
    assert refused(no.value) == {"sampling.scheduler"}


def test_call_kwargs_win_over_defaults_and_lose_to_the_request(load, plain):
    kwargs = {"guidance_scale": 2.0, "num_inference_steps": 3, "negative_prompt": "blurry"}
    adapter = load("stable_diffusion", diffusers_call_kwargs=kwargs)
    fields = {**SMALL, "seeds": (0,)}
    direct = {
        scale: plain("stable_diffusion", like=adapter, output_type="np", **{**kwargs, "guidance_scale": scale}, **SMALL)
        for scale in (2.0, 5.0)
    }
    assert equal(adapter.run(**fields).output, direct[2.0])
    assert equal(adapter.run(**fields, guidance=GuidanceDraft(scale=5.0)).output, direct[5.0])
    assert not equal(direct[2.0], direct[5.0])
    assert not equal(adapter.run(**fields, negative_prompt="static").output, direct[2.0])


def test_tokens_that_do_not_fit_are_counted(load):
    adapter = load("stable_diffusion")
    long = adapter.run(**SMALL, steps=2, prompt="a red cat " * 40)
    short = adapter.run(**SMALL, steps=2, prompt="a red cat")
    assert short.prepared.prompt_tokens == 5
    assert short.prepared.dropped_tokens == ()
    assert long.prepared.prompt_tokens == 122
    assert long.prepared.dropped_tokens == (("prompt", 45),)


def test_parameters_are_written_into_the_files_where_they_are_asked_for(load, tmp_path):
    """Here with an array among the options, which only a caller in the same process can have."""
    adapter = load("stable_diffusion")
    plain = adapter.run(**SMALL, steps=3, seeds=(7,), num_outputs=2)
    made = adapter.run(**SMALL, steps=3, seeds=(7,), num_outputs=2, embed_parameters=True)
    assert not any(map(has_parameters, plain.files))
    for index, data in enumerate(made.files):
        (tmp_path / "a.png").write_bytes(data)
        found = parameters_in(tmp_path / "a.png")
        assert (found.asked.prompt, found.seed) == ("a red cat", 7 + index)
        assert (found.effective["steps"], found.effective["evals"]) == (len(made.progress),) * 2
        assert found.effective["scheduler"] == adapter.checkpoint.scheduler
        assert found.effective["attention_backend"] == adapter.loaded.found.attention_backend != ""
    assert equal(made.output, plain.output)
    latents = np.zeros((1, 4, 8, 8), np.float32)
    kept = adapter.run(**SMALL, seeds=(7,), extra={"latents": torch.from_numpy(latents)}, embed_parameters=True)
    assert not has_parameters(kept.files[0])
    assert "JSON cannot hold" in kept.warnings["PARAMETERS_NOT_EMBEDDED"].message
