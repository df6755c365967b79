"""Webhooks from the event to a real receiver over TLS: checks of requests, attempts, and what follows from answers."""

import asyncio
import json
import logging
import time

import pytest

from omni_grpc.config import OutboundConfig, WebhooksConfig
from omni_grpc.store.job import Job
from omni_grpc.store.memory import MemoryStore
from omni_grpc.store.records import JobState, Outcome, Webhook
from omni_grpc.types.errors import ConfigError
from omni_grpc.webhooks import AskedWebhook, Schedule, Webhooks
from tests.outbound.web import answer, endless, moved, silence
from tests.webhooks.hooks import (
    FAST,
    OTHER,
    SECRET,
    documented_verify,
    ended,
    headers_of,
    loopback,
    make,
    owe,
    render,
    running,
    then,
    until,
)
from tests.webhooks.owed import delivery, record, write

# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"url": ""}, "url", "is required"),
        ({"url": "http://hooks.test/"}, "url", "only https URLs are called"),
        ({"url": "https://other.test/?token=hidden"}, "url", "--webhook-hosts other.test"),
        ({"url": "https://hooks.test:1/"}, "url", "--webhook-hosts hooks.test:1"),
        ({"url": "https://10.0.0.1/"}, "url", "private or reserved"),
        ({"url": "https://169.254.169.254/"}, "url", "private or reserved"),
        ({"url": "https://hidden:hidden@hooks.test/"}, "url", "user name or password"),
        ({"url": "nonsense"}, "url", "https://HOST/PATH"),
        ({"secret_name": "studoi"}, "secret_name", "no secret 'studoi'; those of this tenant are: studio"),
        ({"states": ("RUNING",)}, "states[0]", "RUNING is no state of a job; there are QUEUED, RUNNING, SUCCEEDED"),
        ({"states": ("FAILED", "99")}, "states[1]", "99 is no state"),
        ({"states": ("FAILED", "QUEUED", "FAILED")}, "states[2]", "name each state once"),
    ],
)
async def test_a_webhook_is_refused_by_field_with_the_fix(site, file, changes, field, text):
    hooks = make(site, MemoryStore(), file)
    asked = AskedWebhook(**{"url": site.url("/hook", host="hooks.test"), "secret_name": "studio"} | changes)
    (violation,) = hooks.check(asked, "studio")
    assert violation.field == f"options.webhook.{field}"
    assert text in violation.description
    assert "hidden" not in violation.description
    await hooks.stop()


async def test_everything_that_is_wrong_is_told_at_once(site, file):
    hooks = make(site, MemoryStore(), file)
    found = hooks.check(AskedWebhook(url="", secret_name="x", states=("x", "y")), "studio", field="hook")
    assert [one.field for one in found] == ["hook.url", "hook.secret_name", "hook.states[0]", "hook.states[1]"]
    await hooks.stop()


async def test_a_secret_is_for_its_tenants_alone(site, file):
    hooks = make(site, MemoryStore(), file)
    asked = AskedWebhook(url=site.url("/hook", host="hooks.test"), secret_name="studio")
    assert hooks.check(asked, "studio") == ()
    (violation,) = hooks.check(asked, "shop")
    assert violation.field == "options.webhook.secret_name"
    assert "those of this tenant are: none" in violation.description
    await hooks.stop()


async def test_webhooks_are_off_unless_hosts_are_listed():
    hooks = Webhooks(WebhooksConfig(), OutboundConfig(), MemoryStore(), render, server="a")
    (violation,) = hooks.check(AskedWebhook(url="https://hooks.test/"), "")
    assert violation.field == "options.webhook"
    assert "--webhook-hosts" in violation.description
    await hooks.stop()


async def test_a_new_secret_is_known_while_nothing_is_sent(site, file):
    store = MemoryStore()
    async with running(site, store, file) as hooks:
        asked = AskedWebhook(url=site.url("/hook", host="hooks.test"), secret_name="new")
        assert hooks.check(asked, "studio") != ()
        file.write_text(f"- {{name: new, secret: {SECRET}}}\n", encoding="utf-8")
        await until(lambda: hooks.check(asked, "studio") == ())


def test_a_file_that_cannot_be_used_is_refused_at_the_start(tmp_path):
    config = WebhooksConfig(webhook_hosts=("hooks.test",), webhook_secrets=str(tmp_path / "gone.yaml"))
    with pytest.raises(ConfigError, match="--webhook-secrets"):
        Webhooks(config, OutboundConfig(), MemoryStore(), render, server="a")


# --- what is owed -----------------------------------------------------------------------------------------------------


async def test_states_that_were_asked_for_are_told_of(site, file):
    hooks = make(site, MemoryStore(), file, clock=lambda: 7.5)
    ends = hooks.accepted(AskedWebhook(url="https://B\u00fccher.hooks.test/a"))
    assert ends.states == (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
    starts = hooks.accepted(AskedWebhook(url="https://hooks.test/a", secret_name="studio", states=("RUNNING",)))
    assert starts == Webhook(url="https://hooks.test/a", secret_name="studio", states=(JobState.RUNNING,))
    (owed,) = hooks.deliveries_for(Job(record(webhook=ends, state=JobState.FAILED)))
    assert (owed.id, owed.host, owed.create_time, owed.due) == ("job_1-failed", "xn--bcher-kva.hooks.test", 7.5, 7.5)
    assert json.loads(owed.body) == {"jobId": "job_1", "state": "JOB_STATE_FAILED"}
    assert hooks.deliveries_for(Job(record(webhook=ends, state=JobState.RUNNING))) == ()
    assert hooks.deliveries_for(Job(record(webhook=starts, state=JobState.FAILED))) == ()
    assert hooks.deliveries_for(Job(record(state=JobState.FAILED))) == ()
    await hooks.stop()


# --- what arrives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [SECRET, OTHER], ids=["new", "old"])
async def test_a_delivery_arrives_signed(site, file, secret, caplog):
    caplog.set_level(logging.DEBUG)
    site.paths["/hook"] = answer(status="204 No Content")
    store = MemoryStore()
    async with running(site, store, file) as hooks:
        await owe(hooks, store, site, path="/hook?token=hidden")
        found = await ended(store)
    assert (found.outcome, found.attempts, found.last_error) == (Outcome.DELIVERED, 1, "")
    (head,) = site.asked
    headers, body = headers_of(head), site.bodies[0]
    assert head.startswith("POST /hook?token=hidden HTTP/1.1")
    assert (headers["content-type"], headers["webhook-id"]) == ("application/json", "job_1-succeeded")
    assert json.loads(body) == {"jobId": "job_1", "state": "JOB_STATE_SUCCEEDED"}
    verify = documented_verify()
    verify(secret, headers, body)
    for wrong in (
        (secret.swapcase(), headers, body),
        (secret, headers, body + b" "),
        (secret, headers | {"webhook-id": "job_2-succeeded"}, body),
        (secret, headers | {"webhook-timestamp": str(int(headers["webhook-timestamp"]) + 1)}, body),
        (secret, headers | {"webhook-timestamp": str(int(headers["webhook-timestamp"]) - 301)}, body),
        (secret, headers | {"webhook-signature": "v2," + headers["webhook-signature"].split(",")[1]}, body),
    ):
        with pytest.raises(ValueError, match=r"not signed|too old"):
            verify(*wrong)
    assert not any(word in caplog.text for word in ("hidden", SECRET[8:20], OTHER, "jobId", "v1,"))


async def test_without_a_name_it_is_not_signed(site, file):
    site.paths["/"] = answer()
    store = MemoryStore()
    await store.jobs.write([write(delivery(url=site.url(host="hooks.test"), secret_name="", due=0.0))])
    async with running(site, store, file):
        assert (await ended(store)).outcome is Outcome.DELIVERED
    assert "webhook-id" in headers_of(site.asked[0])
    assert "webhook-signature" not in headers_of(site.asked[0])


async def test_without_its_secret_nothing_is_sent(site, file):
    site.paths["/hook"] = answer()
    store = MemoryStore()
    async with running(site, store, file, schedule=Schedule(first=0.05, factor=1.0, attempts=1000)) as hooks:
        file.write_text("[]", encoding="utf-8")
        await until(
            lambda: hooks.check(AskedWebhook(url=site.url(host="hooks.test"), secret_name="studio"), "studio") != ()
        )
        await owe(hooks, store, site)
        await asyncio.sleep(0.3)
        (found,) = await store.deliveries.of("job_1")
        assert found.attempts >= 1
        assert found.last_error == "--webhook-secrets has no secret 'studio' for its tenant any more"
        assert site.connections == 0
        file.write_text(f"- {{name: studio, secret: {SECRET}}}\n", encoding="utf-8")
        assert (await ended(store)).outcome is Outcome.DELIVERED
    documented_verify()(SECRET, headers_of(site.asked[0]), site.bodies[0])


# --- attempts ---------------------------------------------------------------------------------------------------------


async def test_it_is_tried_again_with_the_same_id_and_body(site, file):
    site.paths["/hook"] = then(answer(status="500 Oops"), answer(status="503 Busy"), answer())
    store = MemoryStore()
    async with running(site, store, file) as hooks:
        await owe(hooks, store, site)
        found = await ended(store)
    assert (found.outcome, found.attempts) == (Outcome.DELIVERED, 3)
    assert {headers_of(head)["webhook-id"] for head in site.asked} == {"job_1-succeeded"}
    assert len(site.bodies) == 3
    assert len(set(site.bodies)) == 1
    for head, body in zip(site.asked, site.bodies, strict=True):
        documented_verify()(SECRET, headers_of(head), body)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (silence, "OUTBOUND_TIMEOUT: the URL names hooks.test, which took longer than 0.2 s"),
        (answer(status="500 Oops"), "it answered with HTTP status 500"),
        (answer(status="404 Not Found"), "it answered with HTTP status 404"),
        (moved("https://hooks.test/elsewhere"), "HTTP status 302; redirects are not followed"),
    ],
)
async def test_it_is_given_up_after_the_schedule(site, file, how, reason, caplog):
    site.paths["/hook"] = how
    store = MemoryStore()
    async with running(site, store, file, webhook_timeout=0.2) as hooks:
        await owe(hooks, store, site)
        found = await ended(store)
    assert (found.outcome, found.attempts, len(site.asked)) == (Outcome.GIVEN_UP, 4, 4)
    assert reason in found.last_error
    (line,) = [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
    said = line.getMessage()
    assert said.startswith("gave up telling hooks.test that job job_1 is SUCCEEDED, after 4 attempts: ")
    assert reason in said
    assert "jobId" not in said


async def test_a_span_ends_it_as_well(site, file):
    """A clock that runs 10,000 times as fast goes through the default schedule in 6 seconds; after 4 hours in one."""
    site.paths["/hook"] = answer(status="500 Oops")
    store, start = MemoryStore(), time.time()
    schedule = Schedule(span=4 * 3600.0)
    fast = {"clock": lambda: start + (time.time() - start) * 10_000}
    async with running(site, store, file, schedule=schedule, **fast) as hooks:
        await owe(hooks, store, site)
        found = await ended(store)
    assert found.outcome is Outcome.GIVEN_UP
    assert found.attempts < schedule.attempts
    assert found.end_time <= found.create_time + schedule.span + 15_000


async def test_410_is_the_end(site, file, caplog):
    site.paths["/hook"] = answer(status="410 Gone")
    store = MemoryStore()
    async with running(site, store, file) as hooks:
        await owe(hooks, store, site)
        found = await ended(store)
    assert (found.outcome, found.attempts, len(site.asked)) == (Outcome.GIVEN_UP, 1, 1)
    assert "after 1 attempts: it answered with HTTP status 410, so it wants no more" in caplog.text


@pytest.mark.parametrize(("seconds", "pause"), [("0", 0.02), ("3600", 0.5)])
async def test_retry_after_is_honored_within_bounds(site, file, seconds, pause):
    site.paths["/hook"] = then(answer(status="429 Slow Down", headers={"Retry-After": seconds}), answer())
    store = MemoryStore()
    async with running(site, store, file) as hooks:
        await owe(hooks, store, site)
        await until(lambda: site.asked)
        first = time.monotonic()
        await ended(store)
    assert pause <= time.monotonic() - first + 0.05 < pause + 0.5


async def test_a_private_address_is_refused_at_each_attempt(site, file):
    """The name had a public address when the webhook was accepted, or nobody had asked for it then."""
    site.paths["/hook"] = answer()
    store = MemoryStore()
    config = site.hooks("hooks.test:{}", webhook_secrets=str(file))
    hooks = Webhooks(config, site.config(), store, render, server="a", schedule=FAST, look_every=0.05, resolve=loopback)
    await hooks.start()
    assert hooks.check(AskedWebhook(url=site.url(host="hooks.test")), "studio") == ()
    await owe(hooks, store, site)
    found = await ended(store)
    await hooks.stop()
    assert (found.outcome, site.connections) == (Outcome.GIVEN_UP, 0)
    assert "OUTBOUND_ADDRESS_NOT_ALLOWED" in found.last_error
    assert "127.0.0.1" not in found.last_error


async def test_an_answer_that_never_ends_does_not_hold_it(site, file):
    site.paths["/hook"] = endless()
    store = MemoryStore()
    async with running(site, store, file) as hooks:
        await owe(hooks, store, site)
        assert (await ended(store)).outcome is Outcome.DELIVERED
