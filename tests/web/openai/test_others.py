"""Models, health, sound, and how errors look."""

from __future__ import annotations

import asyncio
import json

import httpx2
import openai
import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.request import Task
from tests.server.service import serving, starting, until
from tests.server.studio import noise, serving_studio
from tests.server.studio import studio as studio_checkpoint

from ..tokens import token_file
from .conftest import client_of

pytestmark = pytest.mark.service
SMALL = {"prompt": "a red circle", "size": "32x16"}


def browser(service) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=service.http, timeout=30, trust_env=False)


async def test_models_are_listed_and_found(client):
    (model,) = [model async for model in await client.models.list()]
    assert (model.id, model.object, model.owned_by, model.tasks) == ("toy", "model", "omni_grpc", ["TEXT_TO_IMAGE"])
    assert (await client.models.retrieve("toy")) == model
    for ask in (client.models.retrieve("org/other"), client.images.generate(**SMALL, model="gpt-image-1")):
        with pytest.raises(openai.NotFoundError, match="this server has toy") as caught:
            await ask
        assert caught.value.code == "model_not_found"


async def test_health_follows_the_state_and_needs_no_token(tmp_path):
    path, _ = token_file(tmp_path, studio=["generate"])
    async with serving(http_port=0, token_file=path) as service, browser(service) as http:
        answer = await http.get("/health")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
        service.executor.loading.close()
        await service.executor.die()
        answer = await http.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "restarting"})
        service.executor.loading.open()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_before_the_model_is_there(stream):
    """Nothing is known of it yet, not even its steps."""
    async with starting(http_port=0) as (service, _), client_of(service) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.images.generate(prompt="x", stream=stream, partial_images=2)
        assert (caught.value.status_code, caught.value.code) == (503, "model_loading")
        assert "x-should-retry" not in caught.value.response.headers
        assert [model.state async for model in client.models.list()] == ["starting"]
        async with browser(service) as http:
            assert (await http.get("/health")).status_code == 503


async def test_tokens_are_those_of_every_call(tmp_path):
    path, tokens = token_file(tmp_path, maker=["generate"], reader=["read"])
    async with serving(http_port=0, token_file=path) as service:
        async with client_of(service) as nobody:
            with pytest.raises(openai.AuthenticationError) as caught:
                await nobody.images.generate(**SMALL)
            assert caught.value.request_id is not None
        async with client_of(service, api_key=tokens["reader"]) as reader:
            with pytest.raises(openai.PermissionDeniedError) as denied:
                await reader.images.generate(**SMALL)
            assert denied.value.code == "scope_missing"
        async with client_of(service, api_key=tokens["maker"]) as maker:
            answer = await maker.images.generate(**SMALL)
            job = service.engine.jobs.get(answer.job_id)
            assert (job.tenant, job.record.subject) == ("maker", "maker")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/nothing"), ("POST", "/v1/chat/completions"), ("PUT", "/v1/videos/x")]
)
async def test_what_is_not_there(http, method, path):
    answer = await http.request(method, path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"
    assert path in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"].startswith("req_")


async def test_a_listed_page_may_use_the_official_client():
    """It sends headers of its own, and reads what it may repeat from those of the answer."""
    async with serving(http_port=0, http_origins="https://studio.example") as service, browser(service) as http:
        asked = {
            "origin": "https://studio.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os,x-stainless-retry-count",
        }
        assert (await http.options("/v1/images/generations", headers=asked)).status_code == 200
        answer = await http.post("/v1/images/generations", json={}, headers={"origin": asked["origin"]})
        exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert {"x-should-retry", "x-request-id", "retry-after-ms"} <= set(exposed)


FAILURES = (
    (Failure(code=Code.INTERNAL, reason="BAD_STEP", message="it broke"), 500, "server_error", "false"),
    (Failure(code=Code.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", message="too large"), 500, "server_error", "false"),
    (Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message="gone"), 503, "server_error", None),
)


@pytest.mark.parametrize(("failure", "status", "kind", "retry"), FAILURES)
async def test_a_job_that_fails(service, client, failure, status, kind, retry):
    service.executor.failures[Lane.STEP] = failure
    with pytest.raises(openai.InternalServerError, match=failure.message) as caught:
        await client.images.generate(**SMALL)
    error = caught.value
    assert (error.status_code, error.type, error.code) == (status, kind, failure.reason.lower())
    assert error.response.headers.get("x-should-retry") == retry
    assert error.body["job_id"] == service.engine.jobs.newest()[0].id


async def test_a_job_that_somebody_cancels(service, client):
    service.executor.gates[Lane.STEP].close()
    asking = asyncio.create_task(client.images.generate(**SMALL))
    await until(lambda: bool(service.executor.plans))
    (job,) = service.engine.jobs.newest()
    service.engine.cancel(job.id, "by an operator")
    with pytest.raises(openai.ConflictError, match="by an operator") as caught:
        await asking
    assert (caught.value.code, caught.value.response.headers["x-should-retry"]) == ("job_cancelled", "false")


async def test_a_full_queue_says_when_to_come_back():
    async with serving(http_port=0, max_queue=1, max_num_seqs=1) as service, client_of(service) as client:
        service.executor.gates[Lane.STEP].close()
        for _ in range(2):
            await service.create()
        with pytest.raises(openai.RateLimitError) as caught:
            await client.images.generate(**SMALL)
        error = caught.value
        assert (error.code, error.type) == ("queue_full", "rate_limit_error")
        assert "x-should-retry" not in error.response.headers
        seconds = int(error.response.headers["retry-after-ms"]) / 1000
        assert 0 < seconds <= int(error.response.headers["retry-after"])


# --- sound ------------------------------------------------------------------------------------------------------------


async def test_sound_is_the_answer():
    body = {"input": "rain", "audio_length": 2.5, "audio_start": 1, "response_format": "flac", "seed": 7, "speed": 1.0}
    composer = studio_checkpoint(takes=frozenset({"start", "duration"}))
    async with serving_studio(composer, http_port=0) as service, browser(service) as http:
        answer = await http.post("/v1/audio/generate", json=body)
        asked = service.executor.request
    assert (answer.status_code, answer.content) == (200, noise(7)), answer.text
    assert answer.headers["content-type"] == "audio/flac"
    assert (answer.headers["x-seed"], json.loads(answer.headers["x-warnings"])) == ("7", [])
    assert (asked.task, asked.prompt, asked.duration, asked.start) == (Task.TEXT_TO_AUDIO, "rain", 2.5, 1.0)
    assert answer.headers["x-job-id"] == asked.id


async def test_what_sound_has_not(forms, editor):
    refused = (
        ({}, "input"),
        ({"input": "x", "speed": 2}, "speed"),
        ({"input": "x", "response_format": "pcm"}, "response_format"),
        ({"input": "x", "audio_length": 1000}, "audio_length"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "voice": "alloy"}, "voice"),
    )
    for body, param in refused:
        answer = await forms.post("/v1/audio/generate", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
    with pytest.raises(openai.InternalServerError, match="no model here reads a text aloud") as caught:
        await editor.with_options(max_retries=2).audio.speech.create(input="x", model="toy", voice="alloy")
    assert (caught.value.status_code, caught.value.code) == (501, "not_yet_served")
