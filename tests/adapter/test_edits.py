"""Pictures from several pictures."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import pytest
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
    pipeline_qwenimage_layered,
)

from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.media import ImageFormat, ImageInput, Inputs
from omni_grpc.types.request import GuidanceDraft, Task

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
    """These pipelines bring every picture to a megapixel or near, for themselves and for their encoders."""
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 64 * 64)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", 64 * 64)
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_layered):
        dimensions = module.calculate_dimensions
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, own=dimensions: own(area / 100, ratio))


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


def test_qwen_image_edit_has_the_bits_of_diffusers(load, plain):
    adapter = load("qwen_image_edit")
    assert adapter.checkpoint.spec.tasks == (Task.IMAGE_EDIT,)
    asked, arguments = CASES["qwen_image_edit_plus"]
    arguments = {**arguments, "image": PIL_PICTURES[0]}
    direct = plain("qwen_image_edit", like=adapter, seeds=(3,), num_inference_steps=3, output_type="np", **arguments)
    ran = adapter.run(**asked, **EDIT, inputs=Inputs(images=PICTURES[:1]))
    assert equal(ran.output, direct)
    assert direct.std() > 1e-3
    check_steps(ran)
    assert not equal(adapter.run(**asked, **EDIT, inputs=Inputs(images=PICTURES[1:])).output, direct)
    with pytest.raises(InvalidArgument, match="takes at most 1"):
        adapter.run(**asked, **EDIT, inputs=Inputs(images=PICTURES))


ALPHA = np.dstack([GRADIENT, GRADIENT[..., 0].T])
GLASS = ImageInput(64, 64, 4, ALPHA.tobytes())


def test_a_picture_is_taken_apart_into_layers(load, plain):
    adapter = load("qwen_image_layered")
    assert adapter.checkpoint.spec.tasks == (Task.LAYERED,)
    direct = plain(
        "qwen_image_layered", like=adapter, seeds=(3, 4), num_inference_steps=3, output_type="np", layers=2,
        num_images_per_prompt=2, image=PIL.Image.fromarray(ALPHA)
    )  # fmt: skip
    asked = {"task": Task.LAYERED, "steps": 3, "seeds": (3,), "inputs": Inputs(images=(GLASS,))}
    ran = adapter.run(**asked, num_outputs=2, layers=2, output_format=ImageFormat.PNG)
    pictures = np.concatenate(direct)
    assert equal(np.concatenate(ran.output), pictures)
    check_steps(ran)
    media = ran.decoded.media
    assert [(one.index, one.layer, one.seed, one.has_alpha) for one in media] == [
        (0, 0, 3, True), (0, 1, 3, True), (1, 0, 4, True), (1, 1, 4, True),
    ]  # fmt: skip
    files = [np.asarray(PIL.Image.open(io.BytesIO(file))) for file in ran.files]
    assert [file.shape for file in files] == [(64, 64, 4)] * 4
    assert equal(files, (pictures * 255).round().astype(np.uint8))
    assert ran.warnings == {}  # its alpha was looked at
    opaque = Inputs(images=(ImageInput(64, 64, 3, GRADIENT.tobytes()),))
    assert not equal(adapter.run(**{**asked, "inputs": opaque}, layers=2).output[0], direct[0][:2])


def test_layers_have_a_default_and_a_limit(load):
    adapter = load("qwen_image_layered")
    asked = {"task": Task.LAYERED, "inputs": Inputs(images=(GLASS,))}
    assert adapter.request(**asked).layers == 4
    assert adapter.request(**asked, prompt="").prompt == ""  # the model finds words itself
    with pytest.raises(InvalidArgument, match=r"layers: 0 is outside 1\.\.64") as caught:
        adapter.request(**asked, layers=0)
    assert refused(caught.value) == {"layers"}
    with pytest.raises(InvalidArgument, match="is not supported by FluxKontextPipeline"):
        load("flux_kontext").request(task=Task.IMAGE_EDIT, inputs=Inputs(images=(GLASS,)), layers=2)
