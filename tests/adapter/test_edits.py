"""Pictures from several pictures."""

from __future__ import annotations

import numpy as np
import PIL.Image
import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

from omni_grpc.errors import InvalidArgument
from omni_grpc.request import GuidanceDraft, ImageInput, Inputs, Task

from .conftest import GRADIENT, check_steps, equal, refused

WIDE = np.tile(GRADIENT[:, ::-1], (1, 2, 1))
PICTURES = tuple(ImageInput(a.shape[1], a.shape[0], 3, a.tobytes()) for a in (GRADIENT, WIDE))
PIL_PICTURES = [PIL.Image.fromarray(array) for array in (GRADIENT, WIDE)]
SMALL = {"width": 64, "height": 48}
EDIT = {"task": Task.IMAGE_EDIT, "steps": 3, "seeds": (3,)}

# name -> what is asked of the adapter, and the same as arguments of diffusers
CASES = {
    "qwen_image_edit_plus": (
        {**SMALL, "negative_prompt": " ", "guidance": GuidanceDraft(true_cfg_scale=4.0)},
        {**SMALL, "negative_prompt": " ", "true_cfg_scale": 4.0, "image": PIL_PICTURES},
    ),
    "flux2_klein": (
        {**SMALL, "guidance": GuidanceDraft(scale=3.0), "extra": {"max_sequence_length": 64}},
        {**SMALL, "guidance_scale": 3.0, "image": PIL_PICTURES, "max_sequence_length": 64},
    ),
}


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """This pipeline brings every picture to a megapixel, for itself and for its encoder."""
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 64 * 64)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", 64 * 64)


@pytest.mark.parametrize("name", CASES)
def test_an_edit_of_two_pictures_has_the_bits_of_diffusers(name, load, plain):
    asked, arguments = CASES[name]
    adapter = load(name)
    assert Task.IMAGE_EDIT in adapter.checkpoint.spec.tasks
    direct = plain(name, like=adapter, seeds=(3,), num_inference_steps=3, output_type="np", **arguments)
    ran = adapter.run(**asked, **EDIT, inputs=Inputs(images=PICTURES))
    assert equal(ran.output, direct)
    assert ran.output.shape == (1, 48, 64, 3)
    assert direct.std() > 1e-3
    check_steps(ran)
    assert ran.warnings == {}
    for others in (PICTURES[:1], PICTURES[::-1]):
        assert not equal(adapter.run(**asked, **EDIT, inputs=Inputs(images=others)).output, direct)
    assert equal(adapter.run(**asked, **EDIT, inputs=Inputs(images=PICTURES)).output, direct)


def test_each_output_of_an_edit_has_its_own_seed(load, plain):
    adapter = load("flux2_klein")
    arguments = {**CASES["flux2_klein"][1], "num_images_per_prompt": 2}
    direct = plain("flux2_klein", like=adapter, seeds=(3, 4), num_inference_steps=3, output_type="np", **arguments)
    ran = adapter.run(**CASES["flux2_klein"][0], **EDIT, inputs=Inputs(images=PICTURES), num_outputs=2)
    assert equal(ran.output, direct)
    assert [media.seed for media in ran.decoded.media] == [3, 4]


def test_one_picture_is_edited_by_a_pipeline_for_one(load, plain):
    adapter = load("flux_kontext")
    area = {"max_area": 64 * 64, "_auto_resize": False}  # else everything is brought to a megapixel
    direct = plain(
        "flux_kontext", like=adapter, seeds=(3,), num_inference_steps=3, output_type="np", width=64, height=64,
        image=PIL_PICTURES[0], **area
    )  # fmt: skip
    asked = {**EDIT, "width": 64, "height": 64, "extra": area}
    assert equal(adapter.run(**asked, inputs=Inputs(images=PICTURES[:1])).output, direct)
    with pytest.raises(InvalidArgument, match="takes at most 1") as caught:
        adapter.run(**asked, inputs=Inputs(images=PICTURES))
    assert refused(caught.value) == {"images"}
