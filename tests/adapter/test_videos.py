"""Videos from videos, and videos with sound."""

from __future__ import annotations

import io

import av
import numpy as np
import PIL.Image
import pytest

from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.media import ImageInput, Inputs, VideoInput
from omni_grpc.types.request import GuidanceDraft, Task

from .conftest import GRADIENT, check_steps, equal, refused

# a gradient that moves down, a row for each frame
FRAMES = [np.roll(GRADIENT, frame, axis=0) for frame in range(10)]
PIL_FRAMES = [PIL.Image.fromarray(frame) for frame in FRAMES]
PICTURE = ImageInput(64, 64, 3, GRADIENT.tobytes())
SMALL = {"width": 64, "height": 64}


def clip(count: int) -> VideoInput:
    return VideoInput(64, 64, count, 12.0, b"".join(frame.tobytes() for frame in FRAMES[:count]))


# a square that is made anew, and moves
MASK_FRAMES = [np.roll(np.pad(np.full((24, 24), 255, np.uint8), 20), frame, axis=1) for frame in range(10)]
PIL_MASKS = [PIL.Image.fromarray(mask) for mask in MASK_FRAMES]
MASKS = VideoInput(64, 64, 10, 12.0, np.repeat(np.stack(MASK_FRAMES)[..., None], 3, axis=-1).tobytes())


def from_video(count: int = 9, **fields):
    return {"task": Task.VIDEO_TO_VIDEO, "inputs": Inputs(source_video=clip(count)), "steps": 4, "seeds": (3,)} | fields


# name -> what is asked of the adapter, and the same as arguments of diffusers
CASES = {
    "wan_v2v": (
        from_video(strength=0.6, negative_prompt="static"),
        {**SMALL, "video": PIL_FRAMES[:9], "strength": 0.6, "negative_prompt": "static"},
    ),
    "wan_vace": (
        from_video(inputs=Inputs(source_video=clip(9), reference_images=(PICTURE,))),
        {**SMALL, "video": PIL_FRAMES[:9], "num_frames": 9, "reference_images": [PIL_FRAMES[0]]},
    ),
    # white is made anew, frame by frame
    "wan_vace with a mask": (
        from_video(10, task=Task.VIDEO_EDIT, inputs=Inputs(source_video=clip(10), mask_video=MASKS)),
        {**SMALL, "video": PIL_FRAMES[:9], "num_frames": 9, "mask": PIL_MASKS[:9]},
    ),
    "ltx_condition": (
        from_video(num_frames=17, strength=0.25),
        # its strength is the share that is kept, and a list of frames would be a list of videos
        {**SMALL, "video": [PIL_FRAMES[:9]], "num_frames": 17, "strength": 0.75, "frame_rate": 12.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_video_from_a_video_has_the_bits_of_diffusers(name, load, plain):
    asked, arguments = CASES[name]
    name = name.partition(" ")[0]
    adapter = load(name)
    assert asked["task"] in adapter.checkpoint.spec.tasks
    direct = plain(name, like=adapter, seeds=(3,), num_inference_steps=4, output_type="np", **arguments)
    ran = adapter.run(**asked)
    assert equal(ran.output, direct)
    assert np.asarray(direct).std() > 1e-3
    check_steps(ran)
    (media,) = ran.decoded.media
    assert (media.width, media.height, media.num_frames, media.fps) == (64, 64, direct.shape[1], 12.0)
    assert ran.warnings.keys() == ({"SOURCE_TRIMMED"} if asked["task"] is Task.VIDEO_EDIT else set())
    other = adapter.run(**{**asked, "task": Task.VIDEO_TO_VIDEO, "inputs": Inputs(source_video=clip(5))})
    assert not equal(other.output[:, :5], direct[:, :5])


def test_strength_means_the_same_whatever_a_pipeline_calls_it(load):
    # 0 keeps the source and makes what follows it: what this pipeline calls 1
    assert load("ltx_condition").checkpoint.defaults.strength == 0.0
    assert load("wan_v2v").checkpoint.defaults.strength == 0.8
    asked = from_video(num_frames=9, strength=None)
    adapter = load("ltx_condition")
    assert equal(adapter.run(**asked).output, adapter.run(**{**asked, "strength": 0.0}).output)


def test_frames_that_make_no_whole_latent_frame_are_told(load):
    warning = load("wan_v2v").run(**from_video(10)).warnings["SOURCE_TRIMMED"]
    assert (warning.field, warning.requested, warning.applied) == ("source_video", "10", "9")
    trimmed = load("wan_vace").run(**from_video(10))
    assert trimmed.request.num_frames == 9
    assert trimmed.warnings["SOURCE_TRIMMED"].applied == "9"
    assert load("ltx_condition").run(**from_video(10, num_frames=17)).warnings["SOURCE_TRIMMED"].applied == "9"


def test_a_source_is_as_long_as_its_pipeline_needs_it(load):
    adapter = load("wan_vace")
    assert adapter.run(**from_video(9, num_frames=5)).output.shape[1] == 5
    with pytest.raises(InvalidArgument, match="more than the 9 frames") as caught:
        adapter.run(**from_video(9, num_frames=13))
    assert refused(caught.value) == {"num_frames"}


def test_a_first_frame_and_a_video_are_one_too_many(load):
    asked = from_video(inputs=Inputs(first_frame=PICTURE, source_video=clip(9)), num_frames=9)
    with pytest.raises(InvalidArgument, match="leave the other out"):
        load("ltx_condition").run(**asked)


def test_a_video_has_the_sound_of_diffusers(load, plain):
    adapter = load("ltx2")
    assert adapter.checkpoint.spec.tasks == (Task.TEXT_TO_VIDEO, Task.TEXT_TO_AUDIO_VIDEO)
    assert adapter.checkpoint.defaults.guidance.rescale == 0.7
    asked = {**SMALL, "num_frames": 9, "fps": 12.0, "negative_prompt": "static", "steps": 3, "seeds": (3,)}
    asked |= {"task": Task.TEXT_TO_AUDIO_VIDEO, "guidance": GuidanceDraft(scale=2.0)}
    arguments = {**SMALL, "num_frames": 9, "frame_rate": 12.0, "negative_prompt": "static", "guidance_scale": 2.0}
    direct = plain("ltx2", like=adapter, whole=True, seeds=(3,), num_inference_steps=3, output_type="np", **arguments)
    ran = adapter.run(**asked)
    assert equal(ran.result.frames, direct.frames)
    assert equal(ran.result.audio, direct.audio)
    assert direct.audio.std() > 1e-3
    check_steps(ran)
    assert ran.progress[-1].total == 3  # the copy of the scheduler that steps the sound is not counted
    assert ran.warnings == {}
    video, sound = streams(ran.files[0])
    (media,) = ran.decoded.media
    assert (media.num_frames, media.fps, media.sample_rate, video) == (9, 12.0, 8000, 0.75)
    # the last latent of the sound holds a 25th of a second, and AAC fills up its last packet
    assert abs(direct.audio.shape[-1] / 8000 - video) < 0.05
    assert sound == pytest.approx(direct.audio.shape[-1] / 8000, abs=1024 / 8000)
    other = adapter.run(**{**asked, "guidance": GuidanceDraft(scale=2.0, rescale=0.0)})
    assert not equal(other.result.frames, direct.frames)


def test_a_sound_does_not_follow_another_rate(load):
    ran = load("ltx2").run(**SMALL, num_frames=9, fps=24.0, output_fps=12.0, steps=2, task=Task.TEXT_TO_VIDEO)
    warning = ran.warnings["SOUND_OUT_OF_STEP"]
    assert (warning.field, warning.requested, warning.applied) == ("output_fps", "12", "24")


def streams(data: bytes) -> tuple[float, float]:
    """Seconds of the picture and of the sound."""
    with av.open(io.BytesIO(data)) as file:
        picture, sound = file.streams.video[0], file.streams.audio[0]
        samples = sum(frame.samples for frame in file.decode(sound))
        assert (sound.codec_context.name, sound.channels) == ("aac", 2)
        return float(picture.duration * picture.time_base), samples / sound.rate
