"""Previews show what the latents hold, however a pipeline packs them."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import pytest
import torch

from omni_grpc.pipeline.preview import latent_preview
from omni_grpc.types.media import ImageFormat, ImageInput, Inputs, Preview
from omni_grpc.types.request import Task
from omni_grpc.worker import media

from .conftest import GRADIENT

WIDE = {"width": 96, "height": 64}
EDGE = 96
ASKED = Preview(max_edge_px=EDGE, format=ImageFormat.PNG)
PICTURE = ImageInput(64, 64, 3, GRADIENT.tobytes())


def pattern(channels: int, height: int, width: int) -> torch.Tensor:
    """Latents [channels, height, width] that say in which corner they are: bands of slopes that are all different."""
    rows, columns = torch.linspace(-1, 1, height)[:, None], torch.linspace(-1, 1, width)
    slopes = torch.linspace(0.2, 1, channels)[:, None, None]
    return slopes * rows + (1 - slopes) * columns * columns.sign()


def shown(latents: torch.Tensor) -> np.ndarray:
    return media.fit(latent_preview(latents, None), EDGE)


def decoded(preview) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(preview.data)))


def packed_flux(pipeline, picture):
    channels, height, width = picture.shape
    return pipeline._pack_latents(picture[None], 1, channels, height, width)


def packed_ltx(pipeline, picture):
    # the frame in the middle of three
    video = torch.stack([torch.zeros_like(picture), picture, torch.ones_like(picture)], dim=1)
    return pipeline._pack_latents(video[None], 1, 1)


def packed_flux2(pipeline, picture):
    return pipeline._pack_latents(pipeline._patchify_latents(picture[None]))


def packed_layers(pipeline, picture):
    channels, height, width = picture.shape
    layers = torch.stack([picture, *(torch.zeros_like(picture),) * 4])
    return pipeline._pack_latents(layers[None], 1, channels, height, width, 5)


# name -> pixels for each latent one, channels, how its pipeline packs a picture
PACKED = {
    "flux": (8, 16, packed_flux),
    "qwen_image": (8, 16, packed_flux),
    "flux2_klein": (8, 32, packed_flux2),
    "ltx": (32, 16, packed_ltx),
    "ltx2": (32, 16, packed_ltx),
    "qwen_image_layered": (8, 16, packed_layers),
    "stable_diffusion": (8, 4, lambda pipeline, picture: picture[None]),
    "wan_t2v": (8, 16, lambda pipeline, picture: torch.stack([picture * 0, picture, picture * 0], 1)[None]),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_preview_is_the_picture_in_the_latents(name, load):
    side, channels, pack = PACKED[name]
    adapter = load(name)
    (member, *_) = adapter.runner._members
    picture = pattern(channels, 64 // side, 96 // side)
    fields = {"inputs": Inputs(images=(PICTURE,))} if name == "qwen_image_layered" else {}
    request = adapter.request(**WIDE, **fields, preview=ASKED)
    (preview,) = member.previews.make(request, pack(adapter.pipeline, picture))
    assert (preview.width, preview.height) == (96, 64)
    assert np.array_equal(decoded(preview), shown(picture))


def test_latents_with_their_frames_first_are_no_channels(load):
    adapter = load("wan_t2v")
    (member, *_) = adapter.runner._members
    picture = pattern(16, 8, 12)
    frames_first = torch.stack([picture * 0, picture, picture * 0])[None]
    (preview,) = member.previews.make(adapter.request(**WIDE, preview=ASKED), frames_first)
    assert np.array_equal(decoded(preview), shown(picture))


def test_every_output_has_its_own(load):
    adapter = load("flux")
    (member, *_) = adapter.runner._members
    picture = pattern(16, 8, 12)
    packed = torch.cat([packed_flux(adapter.pipeline, one) for one in (picture, picture.flip(1))])
    previews = member.previews.make(adapter.request(**WIDE, preview=ASKED, num_outputs=2), packed)
    assert [preview.index for preview in previews] == [0, 1]
    assert np.array_equal(decoded(previews[0]), shown(picture))
    assert np.array_equal(decoded(previews[1]), shown(picture.flip(1)))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("stable_diffusion", {}),
        ("flux", {}),
        ("wan_t2v", {"num_frames": 5}),
        ("ltx", {"num_frames": 9}),
        ("ltx2", {"num_frames": 9}),
        ("flux2_klein", {"extra": {"max_sequence_length": 64}}),
        ("ltx", {"num_frames": 9, "task": Task.IMAGE_TO_VIDEO, "inputs": Inputs(first_frame=PICTURE)}),
    ],
)
def test_previews_come_when_they_were_asked_for_and_change_nothing(name, fields, load):
    adapter = load(name)
    asked = {"width": 64, "height": 64, "steps": 4, "seeds": (1,), **fields}
    ran = adapter.run(**asked, preview=Preview(every_steps=2, max_edge_px=32))
    made = [progress.step for progress in ran.progress if progress.previews]
    assert made == [step for step in range(1, len(ran.progress) + 1) if step % 2 == 0]
    preview = ran.progress[made[0] - 1].previews[0]
    assert (preview.height, preview.width) == (32, 32)
    assert ran.warnings == {}
    assert adapter.run(**asked).files == ran.files


def test_a_size_that_was_rounded_has_its_picture_too(load):
    ran = load("flux").run(width=72, height=64, steps=2, preview=ASKED)
    assert all(progress.previews for progress in ran.progress)
    assert ran.warnings.keys() == {"SIZE_ROUNDED"}


def test_a_combined_pipeline_shows_its_second_loop(load):
    extra = {"prior_num_inference_steps": 2}
    ran = load("kandinsky").run(width=64, height=64, steps=2, extra=extra, preview=ASKED)
    assert [bool(progress.previews) for progress in ran.progress] == [False, False, True, True]
    assert ran.warnings == {}


def test_latents_that_make_no_picture_are_named(load, monkeypatch):
    adapter = load("flux")
    (member, *_) = adapter.runner._members
    monkeypatch.setattr(member.previews, "_kind", ())
    ran = adapter.run(width=64, height=64, steps=2, preview=Preview())
    assert not any(progress.previews for progress in ran.progress)
    assert "FluxPipeline" in ran.warnings["PREVIEW_NOT_AVAILABLE"].message
    # none was due
    assert adapter.run(width=64, height=64, steps=2, preview=Preview(every_steps=3)).warnings == {}
