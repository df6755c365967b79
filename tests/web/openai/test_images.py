"""POST /v1/images/generations, by the official client."""

from __future__ import annotations

import asyncio
import base64
import json

import httpx2
import openai
import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.media import ImageFormat
from omni_grpc.web.openai import making
from tests.server.fake_executor import picture, previews
from tests.server.service import serving, until

from .conftest import client_of

pytestmark = pytest.mark.service
SMALL = {"prompt": "a red circle", "size": "32x16"}


def newest(service):
    return next(request for plan in reversed(service.executor.plans) for request in plan.admit)


async def test_pictures_come_as_base64_with_their_seeds(service, client):
    answer = await client.images.generate(**SMALL, n=2, extra_body={"seed": 7, "num_inference_steps": 3})
    data = [base64.b64decode(image.b64_json) for image in answer.data]
    assert data == [picture(32, 16, seed, ImageFormat.PNG) for seed in (7, 8)]
    assert [image.seed for image in answer.data] == [7, 8]
    assert (answer.size, answer.output_format, answer.model) == ("32x16", "png", "toy")
    assert answer.warnings == []
    job = await service.get(answer.job_id)
    assert answer.created == job.end_time.seconds


async def test_an_address_works_without_a_token_and_is_absolute(service, client):
    answer = await client.images.generate(**SMALL, response_format="url", output_format="webp", extra_body={"seed": 7})
    async with httpx2.AsyncClient(trust_env=False) as anybody:
        found = await anybody.get(answer.data[0].url)
    assert found.content == picture(32, 16, 7, ImageFormat.WEBP)
    assert found.headers["content-type"] == "image/webp"
    assert answer.data[0].b64_json is None


SAME = (
    ({"num_inference_steps": 3}, {"steps": 3}),
    ({"steps": 3}, {"steps": 3}),
    ({"seed": [4, 9], "n": 2}, {"seeds": (4, 9)}),
    ({"seed": 4, "num_outputs_per_prompt": 2}, {"seeds": (4, 5)}),
    ({"negative_prompt": ""}, {"negative_prompt": ""}),
    ({"width": 48, "height": 32, "size": None}, {"width": 48, "height": 32}),
    ({"size": "auto"}, {"width": 64, "height": 32}),
    ({"output_format": "jpeg"}, {"output_format": ImageFormat.JPEG}),
    ({"enable_teacache": False}, {"cache": None}),
)


async def test_a_field_of_theirs_is_ours(service, client):
    for asked, expected in SAME:
        await client.images.generate(prompt="x", size="32x16", extra_body=asked)
        request = newest(service)
        assert {name: getattr(request, name) for name in expected} == expected, asked


async def test_scales_of_guidance(service, client):
    extra = {"negative_prompt": "blur", "guidance_scale": 3.5}
    answer = await client.images.generate(**SMALL, extra_body=extra)
    assert newest(service).guidance.true_cfg_scale == 3.5
    assert [(one["code"], one["param"]) for one in answer.warnings] == [
        ("guidance_scale_is_true_cfg", "guidance_scale")
    ]
    answer = await client.images.generate(**SMALL, extra_body=extra | {"true_cfg_scale": 2.0})
    assert newest(service).guidance.true_cfg_scale == 2.0
    assert [one["param"] for one in answer.warnings] == ["guidance_scale"]


async def test_what_changes_nothing_is_named_in_the_warnings(client):
    answer = await client.images.generate(
        **SMALL, quality="high", style="vivid", moderation="low", output_compression=50, background="opaque"
    )
    assert [one["param"] for one in answer.warnings] == ["moderation", "output_compression", "quality", "style"]
    answer = await client.images.generate(**SMALL, quality="auto", moderation="auto", background="auto")
    assert answer.warnings == []


async def test_who_it_is_for_is_a_label(service, client):
    answer = await client.images.generate(**SMALL, user="u-1", extra_body={"safety_identifier": "s-2"})
    assert dict((await service.get(answer.job_id)).labels) == {"user": "u-1", "safety_identifier": "s-2"}


REFUSED = (
    ({"size": "33x16"}, "size"),
    ({"size": "large"}, "size"),
    ({"size": "32x16", "width": 32}, "width"),
    ({"n": 99}, "n"),
    ({"n": "2"}, "n"),
    ({"num_inference_steps": 0}, "num_inference_steps"),
    ({"steps": 2, "num_inference_steps": 2}, "num_inference_steps"),
    ({"prompt": " "}, "prompt"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**53}, "seed"),
    ({"seed": [1, 2, 3], "n": 2}, "seed"),
    ({"true_cfg_scale": 1e9}, "true_cfg_scale"),
    ({"guidance_scale": 1e9}, "guidance_scale"),
    ({"cfg_scale": "high"}, "cfg_scale"),
    ({"output_format": "gif"}, "output_format"),
    ({"response_format": "file"}, "response_format"),
    ({"background": "transparent"}, "background"),
    ({"flow_shift": 3}, "flow_shift"),
    ({"sigmas": [1.0, 0.5]}, "sigmas"),
    ({"cache_dit_params": {"Fn_compute_blocks": 1}}, "cache_dit_params"),
    ({"enable_teacache": True}, "enable_teacache"),
    ({"lora": {"name": "x", "path": "/x"}}, "lora.path"),
    ({"lora": [{"name": "x"}]}, "lora.lora_id"),
    ({"loras": {"x": 1.5}}, "loras.lora_id"),
    ({"loras": {"x@transformer_2": 1.5}}, "loras.lora_id"),
    ({"extra_params": {"a": 1}}, "extra_params"),
    ({"max_sequence_length": 256}, "max_sequence_length"),
    ({"layers": 4}, "layers"),
    ({"image": "data:image/png;base64,AA=="}, "image"),
    ({"enhance_prompt": True}, "enhance_prompt"),
    ({"partial_images": 4, "stream": True}, "partial_images"),
    ({"n": 2, "stream": True}, "n"),
    ({"response_format": "url", "stream": True}, "response_format"),
    ({"user": "u" * 129}, "user"),
    ({"user": 7}, "user"),
    ({"nam_inference_steps": 3}, "nam_inference_steps"),
)


async def test_a_refusal_names_the_field_as_the_caller_does(service, client):
    for asked, param in REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/images/generations", cast_to=object, body={"prompt": "x"} | asked)
        assert caught.value.param == param, asked
        assert caught.value.type == "invalid_request_error"
        assert str(caught.value.body["message"]).startswith(param)
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert caught.value.request_id.startswith("req_")
    assert not service.executor.plans, "nothing was begun"


@pytest.mark.parametrize("name", ["prompt", "user", "scheduler", "lora", "labels", "extra_params"])
async def test_half_of_a_surrogate_pair_is_no_text(http, name):
    """JSON can say it, and UTF-8 cannot."""
    value = {"labels": '{"a": "\\ud800"}', "extra_params": '{"a": "\\ud800"}'}.get(name, '"\\ud800"')
    content = f'{{"prompt": "x", "{name}": {value}}}'
    answer = await http.post("/v1/images/generations", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(name)


async def test_all_that_is_wrong_is_told_at_once(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.images.generate(prompt="x", n=99, size="33x16")
    assert [one["param"] for one in caught.value.body["violations"]] == ["size", "n"]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.images.generate(prompt="x", extra_body={"nn": 1, "num_inference_stps": 2})
    assert [one["param"] for one in caught.value.body["violations"]] == ["nn", "num_inference_stps"]
    assert "'num_inference_steps'" in str(caught.value)


@pytest.mark.parametrize(("kind", "data"), [
    ("application/json", b"{"),
    ("application/json", b"[]"),
    ("application/json", b"\xff"),
    ("application/json", b"[" * 100_000),
    ("text/plain", b"prompt=x"),
    ("multipart/form-data", b""),
    ("multipart/form-data; boundary=x", b"nothing"),
    ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="a]["\r\n\r\n1\r\n--x--\r\n'),
])  # fmt: skip
async def test_a_body_that_cannot_be_read(http, kind, data):
    answer = await http.post("/v1/images/generations", content=data, headers={"content-type": kind})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "malformed_message"


async def test_a_form_is_taken_too(service, http):
    """As in the documents of vLLM-Omni: curl -F."""
    fields = {"prompt": (None, "x"), "seed": (None, "42"), "size": (None, "32x16"), "n": (None, "2")}
    answer = await http.post("/v1/images/generations", files=fields)
    assert [one["seed"] for one in answer.json()["data"]] == [42, 43]


@pytest.mark.parametrize("stated", [True, False], ids=["stated", "found"])
async def test_a_body_beyond_the_limit_is_refused(stated):
    async with serving(http_port=0, max_message_bytes=1 << 20) as service:
        data = json.dumps({"prompt": "x" * (1 << 20)}).encode()

        async def pieces():
            for at in range(0, len(data), 65536):
                yield data[at : at + 65536]

        async with httpx2.AsyncClient(base_url=service.http, trust_env=False) as http:
            headers = {"content-type": "application/json"}
            content = data if stated else pieces()
            answer = await http.post("/v1/images/generations", content=content, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "message_too_large"
    assert answer.headers["x-should-retry"] == "false"


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_a_stream_has_partial_images_and_then_the_image(service, client):
    events = await client.images.generate(
        **SMALL, stream=True, partial_images=2, output_format="webp", extra_body={"num_inference_steps": 6, "seed": 7}
    )
    *partial, last = [event async for event in events]
    assert [event.type for event in partial] == ["image_generation.partial_image"] * 2
    assert [event.partial_image_index for event in partial] == [0, 1]
    request = newest(service)
    wanted = [previews(request, step)[0].data for step in (2, 4)]
    assert [base64.b64decode(event.b64_json) for event in partial] == wanted
    assert {(event.output_format, event.size) for event in partial} == {("webp", "32x32")}, "no larger than the image"
    assert last.type == "image_generation.completed"
    assert base64.b64decode(last.b64_json) == picture(32, 16, 7, ImageFormat.WEBP)
    assert (last.size, last.seed, last.usage.total_tokens, last.warnings) == ("32x16", 7, 0, [])


async def test_a_stream_without_partial_images_has_the_image_alone(client):
    events = await client.images.generate(**SMALL, stream=True)
    assert [event.type async for event in events] == ["image_generation.completed"]


async def test_a_stream_gives_signs_of_life():
    async with serving(http_port=0, heartbeat_interval=0.05) as service:
        service.executor.gates[Lane.STEP].close()
        async with httpx2.AsyncClient(base_url=service.http, trust_env=False) as http:
            body = SMALL | {"stream": True}
            async with http.stream("POST", "/v1/images/generations", json=body) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                lines = answer.aiter_lines()
                first = await anext(lines)
                assert first == f": job {answer.headers['x-job-id']}"
                while (await anext(lines)) != ": heartbeat":
                    pass
                service.executor.gates[Lane.STEP].open()
                assert "event: image_generation.completed" in [line async for line in lines]


async def test_a_stream_that_fails_raises_in_the_client(service, client):
    service.executor.failures[Lane.STEP] = Failure(code=Code.INTERNAL, reason="BAD_STEP", message="it broke")
    with pytest.raises(openai.APIError, match="it broke") as caught:
        [event async for event in await client.images.generate(**SMALL, stream=True)]
    assert (caught.value.code, caught.value.type) == ("bad_step", "server_error")


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_cancels_its_job(service, client, stream, caplog):
    caplog.set_level("DEBUG")
    service.executor.gates[Lane.STEP].close()

    async def call():
        events = await client.images.generate(**SMALL, stream=stream)
        return [event async for event in events]

    asking = asyncio.create_task(call())
    await until(lambda: bool(service.executor.plans))
    (job,) = service.engine.jobs.newest()
    asking.cancel()
    await until(lambda: job.state == "CANCELLED")
    await until(lambda: any("generations gone" in record.getMessage() for record in caplog.records))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_call_that_takes_too_long_is_answered_while_its_client_waits(monkeypatch):
    monkeypatch.setattr(making.Maker.__init__, "__kwdefaults__", {"answer_seconds": 0.2})
    async with serving(http_port=0) as slow, client_of(slow) as client:
        slow.executor.gates[Lane.STEP].close()
        with pytest.raises(openai.InternalServerError) as caught:
            await client.with_options(max_retries=2).images.generate(**SMALL)
        assert caught.value.status_code == 504
        assert caught.value.code == "answer_timeout"
        (job,) = slow.engine.jobs.newest()
        assert caught.value.body["job_id"] == job.id
        await until(lambda: job.state == "CANCELLED")
