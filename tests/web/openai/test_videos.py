"""/v1/videos, by the official client: made, looked at, waited for, listed, downloaded, deleted."""

from __future__ import annotations

import asyncio

import openai
import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.request import Task
from tests.server.service import image, until
from tests.server.studio import mp4, noise, png

pytestmark = [pytest.mark.service, pytest.mark.filterwarnings("ignore:The Sora API")]
SMALL = {"prompt": "a red circle moves", "size": "32x16"}


async def test_a_video_from_its_making_to_its_end(studio, editor):
    studio.executor.gates[Lane.STEP].close()
    made = await editor.videos.create(**SMALL, extra_body={"num_frames": 9, "fps": 8, "seed": 7, "steps": 4})
    assert (made.object, made.progress) == ("video", 0)
    assert made.status in ("queued", "in_progress")
    assert (made.size, made.seconds, made.model, made.prompt) == ("32x16", "1.125", "toy", SMALL["prompt"])
    assert made.error is None
    assert made.completed_at is None
    studio.executor.gates[Lane.STEP].let(3)
    await until(lambda: studio.engine.jobs.get(made.id).step == 3)
    running = await editor.videos.retrieve(made.id)
    assert (running.status, running.progress) == ("in_progress", 75)
    studio.executor.gates[Lane.STEP].open()
    done = await editor.videos.poll(made.id, poll_interval_ms=20)
    assert (done.status, done.progress, done.seeds) == ("completed", 100, [7])
    assert done.created_at <= done.completed_at < done.expires_at
    assert (done.num_frames, done.fps, done.media_type) == (9, 8.0, "video/mp4")
    assert done.inference_time_s > 0
    content = await editor.videos.download_content(made.id)
    assert (content.content, content.response.headers["content-type"]) == (noise(7), "video/mp4")
    gone = await editor.videos.delete(made.id)
    assert gone.model_dump() == {"id": made.id, "object": "video.deleted", "deleted": True}
    with pytest.raises(openai.NotFoundError) as caught:
        await editor.videos.retrieve(made.id)
    assert caught.value.code == "job_not_found"


async def test_create_and_poll_in_one(editor):
    done = await editor.videos.create_and_poll(**SMALL, seconds="2", poll_interval_ms=20)
    assert (done.status, done.seconds, done.num_frames) == ("completed", "2.125", 17)


async def test_a_part_of_a_video(editor, forms):
    made = await editor.videos.create_and_poll(**SMALL, extra_body={"seed": 7, "n": 2}, poll_interval_ms=20)
    path = f"/v1/videos/{made.id}/content"
    part = await forms.get(path, headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, noise(7)[10:20])
    assert part.headers["content-range"] == "bytes 10-19/1000"
    assert (await forms.get(path, params={"variant": "1"})).content == noise(8)
    beyond = await forms.get(path, headers={"range": "bytes=5000-"})
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (416, "offset_out_of_range")
    for variant in ("thumbnail", "spritesheet", "2", "9" * 5000):
        answer = await forms.get(path, params={"variant": variant})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "variant")


async def test_a_video_that_is_not_done_has_no_content(studio, editor):
    studio.executor.gates[Lane.STEP].close()
    made = await editor.videos.create(**SMALL)
    with pytest.raises(openai.NotFoundError) as caught:
        await editor.videos.download_content(made.id)
    assert caught.value.code == "video_not_ready"


async def test_a_failed_video_is_no_failed_call(studio, editor):
    studio.executor.failures[Lane.STEP] = Failure(code=Code.INTERNAL, reason="BAD_STEP", message="it broke")
    done = await editor.videos.create_and_poll(**SMALL, poll_interval_ms=20)
    assert (done.status, done.error.code, done.error.message) == ("failed", "bad_step", "it broke")
    assert (done.completed_at, done.progress) == (None, 0)
    with pytest.raises(openai.NotFoundError, match="it broke") as caught:
        await editor.videos.download_content(done.id)
    assert caught.value.code == "video_failed"


async def test_a_cancelled_video_has_failed_for_its_clients(studio, editor):
    studio.executor.gates[Lane.STEP].close()
    made = await editor.videos.create(**SMALL)
    studio.engine.cancel(made.id, "by an operator")
    done = await editor.videos.poll(made.id, poll_interval_ms=20)
    assert (done.status, done.error.code) == ("failed", "job_cancelled")
    assert "by an operator" in done.error.message


async def test_a_running_video_is_stopped_and_deleted(studio, editor):
    studio.executor.gates[Lane.STEP].close()
    made = await editor.videos.create(**SMALL)
    await until(lambda: bool(studio.executor.plans))
    assert (await editor.videos.delete(made.id)).deleted
    assert studio.engine.jobs.newest() == []


async def test_a_video_outlives_the_call_that_made_it(studio, editor):
    studio.executor.gates[Lane.STEP].close()
    made = await editor.videos.create(**SMALL)
    await editor.close()
    await asyncio.sleep(0.1)
    assert not studio.engine.jobs.get(made.id).cancel_requested


async def test_videos_are_listed_and_pictures_are_not(studio, editor):
    ids = []
    for _ in range(5):
        ids.append((await editor.videos.create(**SMALL)).id)
        await studio.create(width=32, height=16)
    listed = [video.id async for video in await editor.videos.list(limit=2)]
    assert listed == ids[::-1]
    page = await editor.videos.list(limit=2, after=ids[3])
    assert ([video.id for video in page.data], page.has_more, page.last_id) == ([ids[2], ids[1]], True, ids[1])
    page = await editor.videos.list(limit=5)
    assert not page.has_more
    for query in ({"limit": 0}, {"limit": 101}, {"limit": 10**4000}, {"order": "asc"}):
        with pytest.raises(openai.BadRequestError) as caught:
            await editor.videos.list(**query)
        assert [caught.value.param] == list(query)
    picture = await studio.create(width=32, height=16)
    with pytest.raises(openai.NotFoundError):
        await editor.videos.retrieve(picture.job_id)


@pytest.mark.parametrize(
    ("reference", "name", "task"),
    [(png(), "first_frame", Task.IMAGE_TO_VIDEO), (mp4(), "source_video", Task.VIDEO_TO_VIDEO)],
    ids=["picture", "video"],
)
async def test_a_reference_is_what_its_bytes_are(studio, editor, reference, name, task):
    await editor.videos.create_and_poll(prompt="x", input_reference=reference, poll_interval_ms=20)
    asked = studio.executor.request
    assert (asked.task, asked.inputs.given) == (task, (name,))


async def test_a_form_and_json_say_the_same(studio, forms):
    """As in the documents of vLLM-Omni: curl -F."""
    fields = {"prompt": "x", "width": 48, "height": 32, "num_frames": 41, "num_inference_steps": 3, "seed": 42}
    asked = []
    form = {name: (None, str(value)) for name, value in fields.items()}
    for sent in ({"files": form}, {"json": fields}, {"json": {**fields, "seed": 42, "generate_sound": False}}):
        answer = await forms.post("/v1/videos", **sent)
        assert answer.status_code == 200, answer.text
        await until(lambda: len(studio.executor.plans) > len(asked))
        request = studio.executor.request
        asked.append((request.width, request.height, request.num_frames, request.steps, request.seeds))
        await until(lambda: studio.engine.jobs.newest()[0].state.terminal)
    assert set(asked) == {(48, 32, 41, 3, (42,))}


async def test_objects_in_a_form(studio, editor):
    """The official client writes extra_body of a form in brackets."""
    with pytest.raises(openai.BadRequestError) as caught:
        await editor.videos.create(**SMALL, extra_body={"lora": [{"name": "a", "scale": 0.5}, {"name": "b"}]})
    assert caught.value.param == "lora.lora_id"
    with pytest.raises(openai.BadRequestError, match=r"lora.scale: is 'much', expected a number"):
        await editor.videos.create(**SMALL, extra_body={"lora": [{"name": "a", "scale": 0.5}, {"scale": "much"}]})
    await editor.videos.create_and_poll(
        **SMALL,
        extra_body={"extra_params": {"a": 1, "b": [1, 2]}, "video_params": {"num_frames": 13}},
        poll_interval_ms=20,
    )
    asked = studio.executor.request
    assert (dict(asked.extra), asked.num_frames) == ({"a": 1, "b": [1, 2]}, 13)


REFUSED = (
    ({"seconds": "long"}, "seconds"),
    ({"seconds": "4", "num_frames": 9}, "num_frames"),
    ({"num_frames": 10}, "num_frames"),
    ({"enable_frame_interpolation": True}, "enable_frame_interpolation"),
    ({"frame_interpolation_exp": 2}, "frame_interpolation_exp"),
    ({"sound_duration": 2}, "sound_duration"),
    ({"aspect_ratio": "16:9"}, "aspect_ratio"),
    ({"output_path": "/tmp/x"}, "output_path"),
    ({"video_params": {"bitrate": 1}}, "video_params.bitrate"),
    ({"video_params": {"num_frames": 10}}, "video_params.num_frames"),
    ({"boundary_ratio": 2}, "boundary_ratio"),
    ({"guidance_scale_2": -1}, "guidance_scale_2"),
    ({"stream": True}, "stream"),
)


async def test_a_refusal_names_the_field_as_the_caller_does(studio, editor):
    for asked, param in REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            await editor.post("/videos", cast_to=object, body={"prompt": "x"} | asked)
        assert caught.value.param == param, asked
    assert not studio.executor.plans


async def test_a_model_without_videos_says_so(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.videos.create(**SMALL)
    assert caught.value.code == "task_not_supported"
    assert image()  # the same server makes pictures
