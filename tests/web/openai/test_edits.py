"""POST /v1/images/edits: pictures as files, data URLs, uploads; masks as OpenAI and as vLLM-Omni have them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator

import httpx2
import openai
import PIL.Image
import pytest
import pytest_asyncio

from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Task
from tests.server.fake_executor import picture
from tests.server.service import Service
from tests.server.studio import pixels, png, serving_studio

from .conftest import client_of

pytestmark = [pytest.mark.service, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def studio() -> AsyncIterator[Service]:
    """One for all: the process that decodes pictures takes a second to start."""
    async with serving_studio(http_port=0) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def editor(studio: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(studio) as made:
        yield made


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def mask_png(hole: tuple[int, int], *, size: tuple[int, int] = (32, 16), mode: str = "RGBA") -> bytes:
    """Transparent (or white, where the mode has no alpha) from the left edge to before `hole[1]`, from `hole[0]` on."""
    image = PIL.Image.new(mode, size, (9, 9, 9, 255) if mode == "RGBA" else 0)
    image.paste((9, 9, 9, 0) if mode == "RGBA" else 255, (hole[0], 0, hole[1], size[1]))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def columns(mask) -> list[int]:
    assert (mask.channels, len(mask.data)) == (1, mask.width * mask.height)
    return list(mask.data[: mask.width])


async def test_a_file_is_edited(studio, editor):
    answer = await editor.images.edit(image=png(), prompt="make it blue", extra_body={"seed": 7})
    asked = studio.executor.request
    assert (asked.task, asked.prompt) == (Task.IMAGE_EDIT, "make it blue")
    assert asked.inputs.images[0].data == pixels().tobytes()
    assert base64.b64decode(answer.data[0].b64_json) == picture(32, 16, 7, ImageFormat.PNG)


async def test_several_files_keep_their_order(studio, editor):
    await editor.images.edit(
        image=[("a.png", png(), "image/png"), ("b.png", png(48, 32, seed=1), "image/png")],
        prompt="x",
        extra_body={"num_inference_steps": 3, "extra_params": {"a": 1}, "negative_prompt": "blur"},
    )
    asked = studio.executor.request
    assert [(one.width, one.height) for one in asked.inputs.images] == [(32, 16), (48, 32)]
    assert (asked.steps, asked.negative_prompt, dict(asked.extra)) == (3, "blur", {"a": 1})


@pytest.mark.parametrize("name", ["mask", "mask_image"])
async def test_a_mask_says_what_is_made_anew(studio, editor, name):
    """OpenAI's by its transparency, vLLM-Omni's by its white."""
    if name == "mask":
        await editor.images.edit(image=png(), mask=mask_png((8, 24)), prompt="x")
    else:
        url = data_url(mask_png((8, 24), mode="L"))
        await editor.images.edit(image=png(), prompt="x", extra_body={"mask_image": url})
    asked = studio.executor.request
    assert asked.task is Task.INPAINT
    assert columns(asked.inputs.mask) == [0] * 8 + [255] * 16 + [0] * 8


async def test_half_transparent_is_half_anew(studio, editor):
    buffer = io.BytesIO()
    PIL.Image.new("RGBA", (32, 16), (0, 0, 0, 100)).save(buffer, "PNG")
    await editor.images.edit(image=png(), mask=buffer.getvalue(), prompt="x")
    assert set(studio.executor.request.inputs.mask.data) == {155}


async def test_pictures_in_json(studio):
    async with httpx2.AsyncClient(base_url=studio.http, timeout=30, trust_env=False) as http:
        await pictures_in_json(studio, http)


async def pictures_in_json(studio, forms):
    upload = await forms.post("/files/assets", content=png(48, 32), headers={"content-type": "image/png"})
    body = {
        "prompt": "x",
        "images": [{"image_url": data_url(png())}, {"file_id": upload.json()["assetId"]}],
        "mask": {"image_url": data_url(mask_png((0, 8)))},
        "strength": 0.5,
    }
    answer = await forms.post("/v1/images/edits", json=body)
    assert answer.status_code == 200, answer.text
    asked = studio.executor.request
    assert [(one.width, one.height) for one in asked.inputs.images] == [(32, 16), (48, 32)]
    assert columns(asked.inputs.mask) == [255] * 8 + [0] * 24
    assert asked.strength == 0.5
    for given in (base64.b64encode(png()).decode(), {"url": {"url": data_url(png())}}, data_url(png())):
        answer = await forms.post("/v1/images/edits", json={"prompt": "x", "image": given})
        assert answer.status_code == 200, answer.text


REFUSED = (
    ({}, "image"),
    ({"image": "no base64!"}, "image"),
    ({"image": 7}, "image"),
    ({"image": "data:\ud800"}, "image"),
    ({"image": {"file_id": "\ud800"}}, "image"),
    ({"image": {"url": {}}}, "image"),
    ({"image": {"file_id": "asset_none"}}, None),
    ({"image": "https://example.org/a.png"}, "image"),
    ({"image": data_url(b"nothing")}, "image"),
    ({"images": [data_url(png()), data_url(b"nothing")]}, "images[1]"),
    ({"image": data_url(png()), "mask": data_url(png())}, "mask"),
    ({"image": data_url(png()), "mask": data_url(mask_png((0, 8), size=(16, 16)))}, "mask"),
    ({"image": data_url(png()), "mask_image": data_url(mask_png((0, 8)))}, "mask_image"),
    ({"image": data_url(png()), "mask": data_url(png()), "mask_image": data_url(png())}, "mask_image"),
    ({"image": data_url(png()), "strength": 1.5}, "strength"),
    ({"image": data_url(png()), "resolution": 640}, "resolution"),
)


async def test_what_is_wrong_with_a_picture_is_told_by_its_name(studio, editor):
    before = len(studio.executor.plans)
    for asked, param in REFUSED:
        content, kind = json.dumps({"prompt": "x"} | asked), {"content-type": "application/json"}
        with pytest.raises(openai.APIStatusError) as caught:
            await editor.post("/images/edits", cast_to=object, content=content.encode(), options={"headers": kind})
        assert caught.value.status_code in (400, 404)
        assert caught.value.param == param, asked
    assert len(studio.executor.plans) == before


async def test_a_stream_of_an_edit(editor):
    events = await editor.images.edit(
        image=png(), prompt="x", stream=True, partial_images=1, extra_body={"num_inference_steps": 4, "seed": 7}
    )
    assert [event.type async for event in events] == ["image_edit.partial_image", "image_edit.completed"]
