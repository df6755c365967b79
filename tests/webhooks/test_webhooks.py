"""Webhooks from the event to a real receiver over TLS: checks of requests, attempts, and what follows from answers."""

import asyncio
import contextlib
import json
import logging
import random
import re
import time
from pathlib import Path

import pytest

from omni_grpc.config import OutboundConfig, WebhooksConfig
from omni_grpc.store.memory import MemoryStore
from omni_grpc.store.records import JobState, JobWrite, Outcome, Webhook
from omni_grpc.store.seam import StoreError
from omni_grpc.types.errors import ConfigError
from omni_grpc.webhooks import Asked, Schedule, Webhooks
from tests.outbound.web import answer, endless, moved, silence, web
from tests.webhooks.owed import delivery, record, write

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "another secret, of 32 characters"
FAST = Schedule(first=0.02, factor=1.5, longest=0.1, attempts=4, longest_asked=0.5)
PAGE = Path(__file__).parents[2] / "docs" / "webhooks.md"


@pytest.fixture
async def site(tmp_path):
    async with web(tmp_path, names=("hooks.test", "*.hooks.test")) as running:
        yield running


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secrets.yaml"
    path.write_text(f"- {{name: studio, tenants: [studio], secret: [{SECRET}, '{OTHER}']}}\n", encoding="utf-8")
    path.chmod(0o600)
    return path


def render(job_id, state):
    return json.dumps({"jobId": job_id, "state": f"JOB_STATE_{state}"}).encode()


async def loopback(host, port):
    return ("127.0.0.1",)


def make(site, store, file, *, schedule=FAST, server="server-1", hosts=("hooks.test:{}", "*.hooks.test:{}"), **changes):
    clock = changes.pop("clock", time.time)
    config = site.hooks(*hosts, "127.0.0.0/8", webhook_secrets=str(file), **{"webhook_timeout": 0.5} | changes)
    return Webhooks(
        config, site.config("hooks.test:{}"), store, render, server=server, schedule=schedule, clock=clock,
        look_every=0.05, resolve=loopback,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def running(*args, **options):
    hooks = make(*args, **options)
    await hooks.start()
    try:
        yield hooks
    finally:
        await hooks.stop(0.0)


async def owe(hooks, store, site, job_id="job_1", *, state=JobState.SUCCEEDED, host="hooks.test", path="/hook"):
    """Writes a state of a job with a webhook, with what is owed for it."""
    webhook = hooks.accepted(Asked(url=site.url(path, host=host), secret_name="studio"))
    one = record(job_id, webhook=webhook, state=state)
    await store.jobs.write([JobWrite(record=one, deliveries=hooks.deliveries_for(one, state), created=True)])
    hooks.wake()


async def ended(store, job_id="job_1", seconds=10.0):
    """The only delivery of a job, once there are no more attempts."""
    async with asyncio.timeout(seconds):
        while True:
            (found,) = await store.deliveries.of(job_id)
            if found.outcome is not Outcome.PENDING:
                return found
            await asyncio.sleep(0.01)


async def until(true, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)


def headers_of(head):
    pairs = (line.partition(":") for line in head.split("\r\n")[1:])
    return {name.lower(): value.strip() for name, _, value in pairs if name}


def documented_verify():
    """The receiver's function of the page for users."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    found = {}
    exec(code, found)
    return found["verify"]


def then(*answers):
    """Answers one after the other; the last one stays."""
    left = list(answers)

    async def write(writer):
        await (left.pop(0) if len(left) > 1 else left[0])(writer)

    return write


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
    asked = Asked(**{"url": site.url("/hook", host="hooks.test"), "secret_name": "studio"} | changes)
    (violation,) = hooks.check(asked, "studio")
    assert violation.field == f"options.webhook.{field}"
    assert text in violation.description
    assert "hidden" not in violation.description
    await hooks.stop()


async def test_everything_that_is_wrong_is_told_at_once(site, file):
    hooks = make(site, MemoryStore(), file)
    found = hooks.check(Asked(url="", secret_name="x", states=("x", "y")), "studio", field="hook")
    assert [one.field for one in found] == ["hook.url", "hook.secret_name", "hook.states[0]", "hook.states[1]"]
    await hooks.stop()


async def test_a_secret_is_for_its_tenants_alone(site, file):
    hooks = make(site, MemoryStore(), file)
    asked = Asked(url=site.url("/hook", host="hooks.test"), secret_name="studio")
    assert hooks.check(asked, "studio") == ()
    (violation,) = hooks.check(asked, "shop")
    assert violation.field == "options.webhook.secret_name"
    assert "those of this tenant are: none" in violation.description
    await hooks.stop()


async def test_webhooks_are_off_unless_hosts_are_listed():
    hooks = Webhooks(WebhooksConfig(), OutboundConfig(), MemoryStore(), render, server="a")
    (violation,) = hooks.check(Asked(url="https://hooks.test/"), "")
    assert violation.field == "options.webhook"
    assert "--webhook-hosts" in violation.description
    await hooks.stop()


async def test_a_new_secret_is_known_while_nothing_is_sent(site, file):
    store = MemoryStore()
    async with running(site, store, file) as hooks:
        asked = Asked(url=site.url("/hook", host="hooks.test"), secret_name="new")
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
    ends = hooks.accepted(Asked(url="https://B\u00fccher.hooks.test/a"))
    assert ends.states == (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
    starts = hooks.accepted(Asked(url="https://hooks.test/a", secret_name="studio", states=("RUNNING",)))
    assert starts == Webhook(url="https://hooks.test/a", secret_name="studio", states=(JobState.RUNNING,))
    (owed,) = hooks.deliveries_for(record(webhook=ends), JobState.FAILED)
    assert (owed.id, owed.host, owed.create_time, owed.due) == ("job_1-failed", "xn--bcher-kva.hooks.test", 7.5, 7.5)
    assert json.loads(owed.body) == {"jobId": "job_1", "state": "JOB_STATE_FAILED"}
    assert hooks.deliveries_for(record(webhook=ends), JobState.RUNNING) == ()
    assert hooks.deliveries_for(record(webhook=starts), JobState.FAILED) == ()
    assert hooks.deliveries_for(record(), JobState.FAILED) == ()
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
        await until(lambda: hooks.check(Asked(url=site.url(host="hooks.test"), secret_name="studio"), "studio") != ())
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
    assert hooks.check(Asked(url=site.url(host="hooks.test")), "studio") == ()
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


# --- many at once -----------------------------------------------------------------------------------------------------


async def test_a_receiver_that_does_not_answer_starves_nobody(site, file):
    site.paths |= {"/dead": silence, "/hook": answer()}
    store = MemoryStore()
    async with running(site, store, file, schedule=Schedule(), webhook_timeout=1.0) as hooks:
        for host in range(6):
            for number in range(20):
                await owe(hooks, store, site, f"dead_{host}_{number}", host=f"dead{host}.hooks.test", path="/dead")
        await until(lambda: site.open == 8)
        for number in range(20):
            await owe(hooks, store, site, f"job_{number}")
        start = time.monotonic()
        for number in range(20):
            assert (await ended(store, f"job_{number}")).outcome is Outcome.DELIVERED
        assert time.monotonic() - start < 3.0, "one time-out of those before, and its own calls"
        # the six are known now, and have half of the calls: whoever comes late has the others at once
        await asyncio.sleep(0.3)
        assert 0 < site.open <= 4
        await owe(hooks, store, site, "late")
        assert (await ended(store, "late", seconds=0.5)).outcome is Outcome.DELIVERED


async def test_hosts_take_turns(site, file):
    """Four slow receivers, which answer and have much to get, hold all eight calls; a fifth one has its turn next."""

    chance = random.Random(1)

    async def slow(writer):
        await asyncio.sleep(chance.uniform(0.05, 0.25))
        await answer()(writer)

    site.paths |= {"/slow": slow, "/hook": answer()}
    store = MemoryStore()
    async with running(site, store, file) as hooks:
        for number in range(10):
            for host in range(4):
                await owe(hooks, store, site, f"slow_{host}_{number}", host=f"slow{host}.hooks.test", path="/slow")
        await until(lambda: site.open == 8)
        await owe(hooks, store, site)
        await ended(store)
        assert len(site.asked) < 20, "of 41"


async def test_calls_are_bounded_in_all_and_by_host(site, file):
    site.paths["/hook"] = silence
    store = MemoryStore()
    async with running(site, store, file, webhook_timeout=5.0) as hooks:
        for number in range(10):
            await owe(hooks, store, site, f"job_{number}")
        await until(lambda: site.open == 2)
        await asyncio.sleep(0.1)
        assert site.open == 2
        for host in range(10):
            await owe(hooks, store, site, f"other_{host}", host=f"a{host}.hooks.test")
        await until(lambda: site.open == 8)
        await asyncio.sleep(0.1)
        assert site.open == 8


async def test_the_loop_does_not_stall(site, file):
    site.paths["/hook"] = answer()
    store, longest = MemoryStore(), 0.0
    async with running(site, store, file) as hooks:
        for number in range(50):
            await owe(hooks, store, site, f"job_{number}")
        while [one for number in range(50) for one in await store.deliveries.of(f"job_{number}") if not one.end_time]:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - before)
    assert longest < 0.25


async def test_two_servers_on_one_store_do_not_send_the_same(site, file):
    site.paths["/hook"] = answer()
    store = MemoryStore()
    store.shared = True
    async with running(site, store, file) as one, running(site, store, file, server="server-2") as two:
        for number in range(30):
            await owe(one, store, site, f"job_{number}")
            two.wake()
        for number in range(30):
            await ended(store, f"job_{number}")
    ids = [headers_of(head)["webhook-id"] for head in site.asked]
    assert len(ids) == len(set(ids)) == 30


# --- the end of a server ----------------------------------------------------------------------------------------------


async def test_a_stop_lets_what_is_on_its_way_arrive(site, file):
    async def slow(writer):
        await asyncio.sleep(0.2)
        await answer()(writer)

    site.paths["/hook"] = slow
    store = MemoryStore()
    hooks = make(site, store, file)
    await hooks.start()
    await owe(hooks, store, site)
    await until(lambda: site.asked)
    await hooks.stop(5.0)
    (found,) = await store.deliveries.of("job_1")
    assert (found.outcome, len(site.asked)) == (Outcome.DELIVERED, 1)


async def test_a_stop_gives_back_what_takes_longer(site, file):
    site.paths["/hook"] = silence
    store = MemoryStore()
    store.shared = True
    hooks = make(site, store, file, webhook_timeout=30.0)
    await hooks.start()
    await owe(hooks, store, site)
    await until(lambda: site.asked)
    start = time.monotonic()
    await hooks.stop(0.1)
    assert time.monotonic() - start < 2.0
    (found,) = await store.deliveries.of("job_1")
    assert (found.outcome, found.attempts) == (Outcome.PENDING, 0)
    site.paths["/hook"] = answer()
    async with running(site, store, file, server="server-2"):
        assert (await ended(store, seconds=3.0)).outcome is Outcome.DELIVERED
    assert len({headers_of(head)["webhook-id"] for head in site.asked}) == 1


class Away(MemoryStore):
    """A store that cannot be reached for a while."""

    def __init__(self):
        super().__init__()
        self.away = False
        inner = self.deliveries

        class Gone:
            def __getattr__(gone, name):
                if self.away and name not in ("add", "of"):
                    raise StoreError("the database does not answer")
                return getattr(inner, name)

        self.deliveries = Gone()


async def test_a_store_that_is_away_is_waited_for(site, file, caplog):
    store = Away()

    async def answered_while_the_store_goes(writer):
        store.away = True
        await answer()(writer)

    site.paths["/hook"] = answered_while_the_store_goes
    async with running(site, store, file) as hooks:
        await owe(hooks, store, site)
        await until(lambda: site.asked)
        await until(lambda: "webhooks wait for the store" in caplog.text)
        store.away = False
        assert (await ended(store)).outcome is Outcome.DELIVERED
    assert len(site.asked) == 1, "the result was written as soon as it could be"
