"""One checkpoint does the tasks that diffusers has other classes for, with one copy of its weights."""

from __future__ import annotations

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting, LTXImageToVideoPipeline

from omni_grpc.types.errors import FailedPrecondition, InvalidArgument
from omni_grpc.types.media import ImageInput, Inputs
from omni_grpc.types.request import Task

from .conftest import GRADIENT, check_steps, equal, refused, same_memory

PICTURE = ImageInput(64, 64, 3, GRADIENT.tobytes())
PIL_PICTURE = PIL.Image.fromarray(GRADIENT)
MASK = np.pad(np.full((32, 32), 255, np.uint8), 16)
MASK_INPUT = ImageInput(64, 64, 1, MASK.tobytes())
SMALL = {"width": 64, "height": 64}
IMAGE_TASKS = (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT)

# name, task -> what is asked of the adapter, and the class of diffusers with the same as arguments
CASES = {
    ("stable_diffusion", Task.IMAGE_TO_IMAGE): (
        {"inputs": Inputs(images=(PICTURE,)), "strength": 0.7},
        AutoPipelineForImage2Image,
        {"image": PIL_PICTURE, "strength": 0.7},
    ),
    ("stable_diffusion", Task.INPAINT): (
        {"inputs": Inputs(images=(PICTURE,), mask=MASK_INPUT), "strength": 0.9},
        AutoPipelineForInpainting,
        {**SMALL, "image": PIL_PICTURE, "mask_image": PIL.Image.fromarray(MASK), "strength": 0.9},
    ),
    ("flux", Task.IMAGE_TO_IMAGE): (
        {"inputs": Inputs(images=(PICTURE,)), "strength": 0.7},
        AutoPipelineForImage2Image,
        {**SMALL, "image": PIL_PICTURE, "strength": 0.7},
    ),
    ("qwen_image", Task.INPAINT): (
        {"inputs": Inputs(images=(PICTURE,), mask=MASK_INPUT), "strength": 0.8},
        AutoPipelineForInpainting,
        {**SMALL, "image": PIL_PICTURE, "mask_image": PIL.Image.fromarray(MASK), "strength": 0.8},
    ),
    ("kandinsky", Task.IMAGE_TO_IMAGE): (
        {"inputs": Inputs(images=(PICTURE,)), "strength": 0.5, "extra": {"prior_num_inference_steps": 3}},
        AutoPipelineForImage2Image,
        {**SMALL, "image": PIL_PICTURE, "strength": 0.5, "prior_num_inference_steps": 3},
    ),
    ("ltx", Task.IMAGE_TO_VIDEO): (
        {"inputs": Inputs(first_frame=PICTURE), "num_frames": 9},
        LTXImageToVideoPipeline,
        {**SMALL, "image": PIL_PICTURE, "num_frames": 9},
    ),
}


@pytest.mark.parametrize(("name", "task"), CASES)
def test_a_sibling_has_the_bits_of_diffusers_and_leaves_nothing_behind(name, task, load, tiny):
    asked, kind, arguments = CASES[name, task]
    adapter = load(name)
    direct = kind.from_pretrained(tiny(name), local_files_only=True)
    direct.set_progress_bar_config(disable=True)
    same_memory(direct, adapter.pipeline)
    generator = torch.Generator().manual_seed(3)
    expected = direct(prompt="a red cat", generator=generator, num_inference_steps=4, output_type="np", **arguments)[0]
    of_text = {**SMALL, "steps": 2, "seeds": (1,), **({"num_frames": 9} if name == "ltx" else {})}
    before = adapter.run(**of_text)
    ran = adapter.run(**asked, task=task, steps=4, seeds=(3,))
    assert equal(ran.output, expected)
    if name == "kandinsky":
        # how much its strength skips is known when its second loop begins
        assert [(move.step, move.total) for move in ran.progress] == [(1, 7), (2, 7), (3, 5), (4, 5), (5, 5)]
    else:
        check_steps(ran)
    assert ran.warnings == {}
    assert equal(adapter.run(**of_text).output, before.output)
    # one that was dropped leaves nothing behind either
    dropped = adapter.request(**asked, task=task, steps=4, seeds=(9,))
    adapter.runner.prepare(dropped)
    adapter.runner.step((dropped.id,))
    adapter.runner.drop((dropped.id,))
    assert equal(adapter.run(**asked, task=task, steps=4, seeds=(3,)).output, expected)
    assert equal(adapter.run(**of_text).output, before.output)


def test_weights_are_shared_and_every_task_has_its_own_defaults(load):
    adapter = load("stable_diffusion", diffusers_call_kwargs={"guidance_scale": 3.0, "strength": 0.5})
    own, *others = adapter.runner._members
    assert [member.name for member in others] == ["StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"]
    for member in others:
        assert all(member.pipeline.components[name] is part for name, part in own.pipeline.components.items())
    assert adapter.checkpoint.tasks == IMAGE_TASKS
    requests = [adapter.request(task=task, inputs=inputs(task)) for task in IMAGE_TASKS]
    assert [request.strength for request in requests] == [None, 0.5, 0.5]
    assert [request.guidance.scale for request in requests] == [3.0] * 3
    others = load("stable_diffusion")
    requests = [others.request(task=task, inputs=inputs(task)) for task in IMAGE_TASKS]
    assert [request.strength for request in requests] == [None, 0.8, 1.0]
    assert [request.guidance.scale for request in requests] == [7.5] * 3


def inputs(task: Task) -> Inputs:
    images = () if task is Task.TEXT_TO_IMAGE else (PICTURE,)
    return Inputs(images=images, mask=MASK_INPUT if task is Task.INPAINT else None)


def test_a_task_takes_what_its_class_takes(load):
    adapter = load("stable_diffusion")
    with pytest.raises(InvalidArgument, match="is not supported by StableDiffusionPipeline") as caught:
        adapter.request(inputs=Inputs(images=(PICTURE,)))
    assert refused(caught.value) == {"images"}
    with pytest.raises(InvalidArgument, match="is required for INPAINT"):
        adapter.request(task=Task.INPAINT, inputs=Inputs(images=(PICTURE,)))
    refusal = "does not support IMAGE_EDIT; supported tasks: TEXT_TO_IMAGE, IMAGE_TO_IMAGE"
    with pytest.raises(FailedPrecondition, match=refusal):
        adapter.request(task=Task.IMAGE_EDIT, inputs=Inputs(images=(PICTURE,)))


def test_what_a_sibling_would_leave_out_is_refused_by_name(load):
    # its second expert would be lost
    with pytest.raises(FailedPrecondition, match="WanVideoToVideoPipeline has no use for transformer_2"):
        load("wan_t2v").request(task=Task.VIDEO_TO_VIDEO)
    cached = load("flux", cache_backend="first_block", cache_config={"threshold": 0.1})
    with pytest.raises(FailedPrecondition, match="does not name the passes of its steps"):
        cached.request(task=Task.IMAGE_TO_IMAGE, inputs=Inputs(images=(PICTURE,)))
    assert cached.run(**SMALL, steps=2).output.shape == (1, 64, 64, 3)
    # trained to see a mask: without one it makes nothing
    assert load("stable_diffusion_inpaint").checkpoint.tasks == (Task.INPAINT,)
