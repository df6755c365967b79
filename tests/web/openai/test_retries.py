"""A call that its client repeats is one job, and two calls that look the same are two."""

from __future__ import annotations

import asyncio

import httpx2
import openai
import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.web.openai.attempts import KEPT_SECONDS, Attempts
from tests.server.service import serving, until

from ..tokens import token_file
from .conftest import client_of

pytestmark = [pytest.mark.service, pytest.mark.filterwarnings("ignore:The Sora API")]
SMALL = {"prompt": "a red circle", "size": "32x16"}
FIRST, AGAIN = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}


def jobs(service) -> list:
    return service.engine.jobs.newest()


async def test_calls_that_look_the_same_are_several_jobs(service, client):
    answers = await asyncio.gather(*(client.images.generate(**SMALL) for _ in range(3)))
    answers.append(await client.images.generate(**SMALL))
    assert len({answer.job_id for answer in answers}) == 4 == len(jobs(service))
    assert len({answer.data[0].seed for answer in answers}) == 4


async def test_a_repetition_while_the_first_is_open_has_its_job(service, http):
    """The server does not know that the client has left: a proxy is between them."""
    service.executor.gates[Lane.STEP].close()
    first = asyncio.create_task(http.post("/v1/images/generations", json=SMALL, headers=FIRST))
    await until(lambda: bool(service.executor.plans))
    again = asyncio.create_task(http.post("/v1/images/generations", json=SMALL, headers=AGAIN))
    (job,) = jobs(service)
    await until(lambda: job.watchers == 2)
    service.executor.gates[Lane.STEP].open()
    one, other = await asyncio.gather(first, again)
    assert one.json()["data"] == other.json()["data"]
    assert [warning["code"] for warning in other.json()["warnings"]] == ["repeated_call"]
    assert one.json()["warnings"] == []
    assert len(jobs(service)) == 1


async def test_a_repetition_keeps_the_job_when_the_first_is_found_to_have_left(service, http):
    service.executor.gates[Lane.STEP].close()
    first = asyncio.create_task(http.post("/v1/images/generations", json=SMALL, headers=FIRST))
    await until(lambda: bool(service.executor.plans))
    again = asyncio.create_task(http.post("/v1/images/generations", json=SMALL, headers=AGAIN))
    (job,) = jobs(service)
    await until(lambda: job.watchers == 2)
    first.cancel()
    await until(lambda: job.watchers == 1)
    service.executor.gates[Lane.STEP].open()
    assert (await again).status_code == 200
    assert len(jobs(service)) == 1


async def test_the_client_s_own_repetition_after_a_time_out_leaves_one_job_that_runs(service):
    """Its first attempt is seen to leave, and is cancelled at once; the second makes the picture."""
    service.executor.gates[Lane.STEP].close()
    async with client_of(service, max_retries=2, timeout=0.5) as client:
        asking = asyncio.create_task(client.images.generate(**SMALL))
        await until(lambda: len(jobs(service)) == 2)
        service.executor.gates[Lane.STEP].open()
        answer = await asking
    newest, oldest = jobs(service)
    assert (oldest.state, newest.state, newest.id) == ("CANCELLED", "SUCCEEDED", answer.job_id)
    assert answer.warnings == []


async def test_a_repetition_of_what_was_refused_takes_no_other_call_s_job():
    """Of several calls that look the same some are refused, as the queue is full: each gets a picture of its own."""
    async with (
        serving(http_port=0, max_queue=1, max_num_seqs=1) as service,
        httpx2.AsyncClient(base_url=service.http, timeout=30, trust_env=False) as http,
    ):
        service.executor.gates[Lane.STEP].close()
        first = asyncio.create_task(http.post("/v1/images/generations", json=SMALL, headers=FIRST))
        await until(lambda: bool(service.executor.plans))
        other = await service.create()
        refused = await http.post("/v1/images/generations", json=SMALL, headers=FIRST)
        assert refused.status_code == 429
        service.engine.cancel(other.job_id, "to make room")
        await until(lambda: jobs(service)[0].state.terminal)
        again = asyncio.create_task(http.post("/v1/images/generations", json=SMALL, headers=AGAIN))
        await until(lambda: len(jobs(service)) == 3)
        service.executor.gates[Lane.STEP].open()
        one, another = await asyncio.gather(first, again)
    assert one.json()["job_id"] != another.json()["job_id"]
    assert another.json()["warnings"] == []


async def test_a_repetition_after_the_answer_was_lost_has_the_same_video(studio, forms):
    form = {name: (None, value) for name, value in SMALL.items()}
    first = (await forms.post("/v1/videos", files=form, headers=FIRST)).json()
    again = (await forms.post("/v1/videos", files=form, headers=AGAIN)).json()
    assert first["id"] == again["id"]
    assert [warning["code"] for warning in again["warnings"]] == ["repeated_call"]
    third = (await forms.post("/v1/videos", files=form, headers={"x-stainless-retry-count": "2"})).json()
    assert third["id"] == first["id"]
    assert len(jobs(studio)) == 1


async def test_a_video_that_its_client_knows_is_no_other_call_s(studio, forms):
    first = (await forms.post("/v1/videos", json=SMALL, headers=FIRST)).json()
    await forms.get(f"/v1/videos/{first['id']}")
    again = (await forms.post("/v1/videos", json=SMALL, headers=AGAIN)).json()
    assert first["id"] != again["id"]


async def test_another_caller_is_another_call(tmp_path):
    path, tokens = token_file(tmp_path, one=["generate"], other=["generate"])
    made = []
    async with serving(http_port=0, token_file=path) as service:
        for (_, token), count in zip(tokens.items(), (FIRST, AGAIN), strict=True):
            async with client_of(service, api_key=token) as client:
                made.append((await client.images.generate(**SMALL, extra_headers=count)).job_id)
    assert len(set(made)) == 2


@pytest.mark.parametrize("other", [{"prompt": "another"}, {"n": 2}, {"response_format": "url"}])
async def test_another_body_is_another_call(http, other):
    first = await http.post("/v1/images/generations", json=SMALL, headers=FIRST)
    again = await http.post("/v1/images/generations", json=SMALL | other, headers=AGAIN)
    assert first.json()["job_id"] != again.json()["job_id"]


async def test_a_key_is_the_same_job_whoever_counts(service, client):
    key = {"Idempotency-Key": "key-1"}
    one = await client.images.generate(**SMALL, extra_headers=key)
    other = await client.images.generate(**SMALL, extra_headers=key)
    assert one.job_id == other.job_id
    assert one.data == other.data
    assert (await service.get(one.job_id)).request_id == "key-1"
    with pytest.raises(openai.ConflictError) as caught:
        await client.with_options(max_retries=2).images.generate(prompt="another", extra_headers=key)
    assert caught.value.code == "request_id_reused"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.images.generate(**SMALL, extra_headers={"Idempotency-Key": "k" * 129})
    assert caught.value.param == "Idempotency-Key"


async def test_a_call_with_a_key_may_come_back(service, client):
    """Its job has the server's grace, and not none."""
    service.executor.gates[Lane.STEP].close()
    key = {"Idempotency-Key": "key-1"}
    asking = asyncio.create_task(client.images.generate(**SMALL, extra_headers=key))
    await until(lambda: bool(service.executor.plans))
    (job,) = jobs(service)
    await until(lambda: job.watchers == 1)
    asking.cancel()
    await until(lambda: job.watchers == 0)
    asking = asyncio.create_task(client.images.generate(**SMALL, extra_headers=key))
    await until(lambda: job.watchers == 1)
    service.executor.gates[Lane.STEP].open()
    assert (await asking).job_id == job.id


async def test_attempts_are_matched_one_by_one():
    now = 0.0
    attempts = Attempts(lambda: now)

    def attempt(number: int, name: str, call: bytes = b"call") -> tuple[str, bool]:
        with attempts.attempt(call, number, name) as made:
            return made.request_id, made.repeats

    with pytest.raises(ValueError), attempts.attempt(b"call", 0, "refused"):
        raise ValueError
    assert attempt(0, "answered") == ("answered", False)
    with pytest.raises(asyncio.CancelledError), attempts.attempt(b"call", 0, "lost"):
        raise asyncio.CancelledError
    with attempts.attempt(b"call", 0, "open"):
        # the most certain first: it was seen to leave, it was refused, it is open, it was answered
        assert [attempt(1, name) for name in "abcde"] == [
            ("lost", True), ("b", False), ("open", True), ("answered", True), ("e", False)
        ]  # fmt: skip
        assert attempt(1, "f", b"another call") == ("f", False)
        assert attempt(2, "g")[1]
    attempts.received("answered")
    assert attempt(0, "late") == ("late", False)
    now = KEPT_SECONDS + 1
    assert attempt(1, "h") == ("h", False)
    now *= 2.1
    assert attempt(0, "i") == ("i", False)
    assert len(attempts._by_call) == len(attempts._by_id) == len(attempts._ended) == 1, "what is over is forgotten"
