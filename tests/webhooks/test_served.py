"""Webhooks of a real server: asked for in a request, sent as the job's record, owed by the commit of its event."""

import json

import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.v1 import job_pb2
from tests.outbound.web import answer, web
from tests.server.service import refusal, serving, until

pytestmark = pytest.mark.service


@pytest.fixture
async def receiver(tmp_path):
    async with web(tmp_path) as site:
        site.paths["/hook"] = answer(b"")
        yield site


def settings(site):
    hosts = ",".join(site.hooks("127.0.0.1:{}", "127.0.0.0/8").webhook_hosts)
    return {"webhook_hosts": hosts, "outbound_ca": str(site.ca)}


def told(site):
    return [(record["jobId"], record["state"]) for record in map(json.loads, site.bodies)]


async def test_a_receiver_is_told_of_the_states_that_a_request_names(receiver):
    async with serving(**settings(receiver)) as service:
        url = receiver.url("/hook", host="127.0.0.1")
        states = ["JOB_STATE_QUEUED", "JOB_STATE_RUNNING", "JOB_STATE_SUCCEEDED"]
        job = await service.create(options={"webhook": {"url": url, "states": states}, "labels": {"a": "b"}})
        await service.watch(job.job_id)
        await until(lambda: len(receiver.bodies) == 3)
        assert sorted(told(receiver)) == sorted((job.job_id, state) for state in states)
        (done,) = (one for one in map(json.loads, receiver.bodies) if one["state"] == "JOB_STATE_SUCCEEDED")
        kept = await service.get(job.job_id)
        assert (done["artifacts"][0]["artifactId"], done["labels"]) == (kept.artifacts[0].artifact_id, {"a": "b"})
        assert all("webhook-id: " in head for head in receiver.asked)


async def test_the_end_is_told_of_where_no_state_is_named(receiver):
    async with serving(**settings(receiver)) as service:
        service.executor.gates[Lane.STEP].close()
        job = await service.create(options={"webhook": {"url": receiver.url("/hook", host="127.0.0.1")}})
        await service.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=job.job_id, reason="enough"))
        await until(lambda: receiver.bodies)
        assert told(receiver) == [(job.job_id, "JOB_STATE_CANCELLED")]


@pytest.mark.parametrize(
    ("webhook", "field"),
    [
        ({"url": "https://elsewhere.test/"}, "options.webhook.url"),
        ({"url": "http://127.0.0.1/hook"}, "options.webhook.url"),
        ({}, "options.webhook.url"),
        ({"secret_name": "nobody"}, "options.webhook.secret_name"),
        ({"states": [9]}, "options.webhook.states[0]"),
        ({"states": ["JOB_STATE_FAILED", "JOB_STATE_FAILED"]}, "options.webhook.states[1]"),
    ],
)
async def test_a_webhook_that_cannot_be_called_is_refused_before_work(receiver, webhook, field):
    async with serving(**settings(receiver)) as service:
        given = {"url": receiver.url("/hook", host="127.0.0.1")} if webhook and "url" not in webhook else {}
        error = await refusal(service.create(options={"webhook": given | webhook}))
        assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field])
        assert len(service.engine.jobs) == 0
