"""Webhooks of a server for tests: quick schedules, loopback for every name, and what is owed by hand."""

import asyncio
import contextlib
import json
import re
import time
from pathlib import Path

from omni_grpc.store.job import Job
from omni_grpc.store.records import JobState, JobWrite, Outcome
from omni_grpc.webhooks import AskedWebhook, Schedule, Webhooks
from tests.webhooks.owed import record

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "another secret, of 32 characters"
FAST = Schedule(first=0.02, factor=1.5, longest=0.1, attempts=4, longest_asked=0.5)
PAGE = Path(__file__).parents[2] / "docs" / "webhooks.md"


def render(job):
    return json.dumps({"jobId": job.id, "state": f"JOB_STATE_{job.state}"}).encode()


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
    webhook = hooks.accepted(AskedWebhook(url=site.url(path, host=host), secret_name="studio"))
    one = record(job_id, webhook=webhook, state=state)
    await store.jobs.write([JobWrite(record=one, deliveries=hooks.deliveries_for(Job(one)), created=True)])
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
