"""Pipelines with encoders, transformers and parameters of their own: each has the bits of diffusers."""

from __future__ import annotations

import functools

import numpy as np
import PIL.Image
import pytest
from diffusers import HiDreamImagePipeline
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit

from omni_grpc.types.media import ImageInput, Inputs
from omni_grpc.types.request import GuidanceDraft, Task

from .conftest import GRADIENT, check_steps, equal

PICTURE = ImageInput(64, 64, 3, GRADIENT.tobytes())
PIL_PICTURE = PIL.Image.fromarray(GRADIENT)
SMALL = {"width": 64, "height": 64}
# what LTX-2.3 has beside guidance by a text
STG = {
    "max_sequence_length": 128,
    "modality_scale": 3.0,
    "spatio_temporal_guidance_blocks": [1],
    "stg_scale": 1.0,
    "use_cross_timestep": True,
}

# name -> its task, what is asked of the adapter, and the same as arguments of diffusers
CASES = {
    "stable_diffusion3": (
        Task.TEXT_TO_IMAGE,
        {**SMALL, "negative_prompt": "blurry", "guidance": GuidanceDraft(scale=4.5)},
        {**SMALL, "negative_prompt": "blurry", "guidance_scale": 4.5},
    ),
    "hidream": (
        Task.TEXT_TO_IMAGE,
        {
            **SMALL,
            "negative_prompt": "blurry",
            "guidance": GuidanceDraft(scale=4.0),
            "extra": {"max_sequence_length": 64},
        },
        {**SMALL, "negative_prompt": "blurry", "guidance_scale": 4.0, "max_sequence_length": 64},
    ),
    "ovis_image": (
        Task.TEXT_TO_IMAGE,
        {**SMALL, "negative_prompt": "blurry", "guidance": GuidanceDraft(scale=5.0)},
        {**SMALL, "negative_prompt": "blurry", "guidance_scale": 5.0},
    ),
    "longcat_image": (
        Task.TEXT_TO_IMAGE,
        {**SMALL, "guidance": GuidanceDraft(scale=4.0), "extra": {"enable_prompt_rewrite": False}},
        {**SMALL, "guidance_scale": 4.0, "enable_prompt_rewrite": False},
    ),
    "longcat_image_edit": (
        Task.IMAGE_EDIT,
        {"inputs": Inputs(images=(PICTURE,)), "negative_prompt": "blurry", "guidance": GuidanceDraft(scale=4.0)},
        {"image": PIL_PICTURE, "negative_prompt": "blurry", "guidance_scale": 4.0},
    ),
    "flux2_dev": (
        Task.IMAGE_EDIT,
        {
            **SMALL,
            "inputs": Inputs(images=(PICTURE, PICTURE)),
            "guidance": GuidanceDraft(scale=3.0),
            "extra": {"max_sequence_length": 128},
        },
        {**SMALL, "image": [PIL_PICTURE, PIL_PICTURE], "guidance_scale": 3.0, "max_sequence_length": 128},
    ),
    "glm_image": (
        Task.TEXT_TO_IMAGE,
        {**SMALL, "prompt": 'a red cat with "hi" on it', "guidance": GuidanceDraft(scale=1.5)},
        {**SMALL, "prompt": 'a red cat with "hi" on it', "guidance_scale": 1.5},
    ),
    "cosmos3": (
        Task.IMAGE_TO_VIDEO,
        {**SMALL, "inputs": Inputs(first_frame=PICTURE), "num_frames": 5, "guidance": GuidanceDraft(scale=4.0)},
        {**SMALL, "image": PIL_PICTURE, "num_frames": 5, "guidance_scale": 4.0},
    ),
    "ernie_image": (
        Task.TEXT_TO_IMAGE,
        {**SMALL, "negative_prompt": "blurry", "guidance": GuidanceDraft(scale=4.0)},
        {**SMALL, "negative_prompt": "blurry", "guidance_scale": 4.0},
    ),
    "ltx2_3": (
        Task.TEXT_TO_AUDIO_VIDEO,
        {**SMALL, "num_frames": 9, "guidance": GuidanceDraft(scale=3.0), "extra": STG},
        {**SMALL, "num_frames": 9, "guidance_scale": 3.0, **STG},
    ),
    "hunyuan_video15_i2v": (
        Task.IMAGE_TO_VIDEO,
        {"inputs": Inputs(first_frame=PICTURE), "num_frames": 5, "negative_prompt": "blurry"},
        {"image": PIL_PICTURE, "num_frames": 5, "negative_prompt": "blurry"},
    ),
}


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """These bring every picture to a megapixel, whatever size is asked for."""
    dimensions = pipeline_longcat_image_edit.calculate_dimensions
    monkeypatch.setattr(
        pipeline_longcat_image_edit, "calculate_dimensions", lambda area, ratio: dimensions(area / 256, ratio)
    )
    make = HiDreamImagePipeline.__init__

    @functools.wraps(make)
    def small(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.default_sample_size = 8

    monkeypatch.setattr(HiDreamImagePipeline, "__init__", small)


@pytest.mark.parametrize("name", CASES)
def test_the_same_arguments_give_the_same_bits(name, load, plain):
    task, asked, arguments = CASES[name]
    adapter = load(name)
    assert task in adapter.checkpoint.spec.tasks
    direct = plain(name, like=adapter, seeds=(3,), num_inference_steps=2, output_type="np", **arguments)
    ran = adapter.run(**asked, task=task, steps=2, seeds=(3,))
    assert equal(ran.output, direct)
    assert np.isfinite(np.asarray(direct)).all()
    assert np.asarray(direct).std() > 1e-3
    assert np.asarray(direct).shape[-3:] == (64, 64, 3)
    check_steps(ran)
    assert "RANDOMNESS_SHARED" not in ran.warnings
