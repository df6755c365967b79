"""What is owed outlives the process: it is sent by the next one, and again where nobody knows whether it arrived."""

import asyncio
import contextlib
import signal
import sys
import time
from pathlib import Path

from omni_grpc.store.memory import MemoryStore
from omni_grpc.store.records import JobState, Outcome
from omni_grpc.store.sql import SqlStore
from tests.outbound.web import answer, silence
from tests.webhooks.hooks import ended, headers_of, running, until
from tests.webhooks.owed import delivery, write

ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def process(*arguments):
    command = [sys.executable, "-m", "tests.webhooks.process", *map(str, arguments)]
    sender = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        yield sender
    finally:
        if sender.returncode is None:
            sender.kill()
        await sender.wait()


async def test_a_sender_that_is_killed_after_the_post_sends_it_again(site, file, tmp_path):
    path = tmp_path / "jobs.db"
    store = SqlStore.sqlite(path)
    await store.open()
    states = (JobState.RUNNING, JobState.SUCCEEDED)
    owed = [delivery("job_1", state, url=site.url(f"/{state.lower()}", host="hooks.test")) for state in states]
    await store.jobs.write([write(*owed)])
    await store.close()

    site.paths |= {"/running": answer(), "/succeeded": silence}
    async with process(path, file, site.ca, site.port) as sender:
        # one is delivered; of the other the receiver has everything, and the sender no answer yet
        await until(lambda: len(site.bodies) == 2, 20.0)
        await asyncio.sleep(0.3)
        sender.send_signal(signal.SIGKILL)
        await sender.wait()
    await until(lambda: not site.open)

    site.paths["/succeeded"] = answer()
    async with process(path, file, site.ca, site.port):
        await until(lambda: len(site.bodies) == 3, 20.0)
        await asyncio.sleep(0.3)
    ids = [headers_of(head)["webhook-id"] for head in site.asked]
    assert sorted(ids) == ["job_1-running", "job_1-succeeded", "job_1-succeeded"]
    assert set(site.bodies) == {owed[0].body}
    await store.open()
    assert [one.outcome for one in await store.deliveries.of("job_1")] == [Outcome.DELIVERED] * 2
    await store.close()


async def test_what_a_lost_server_has_claimed_comes_back(site, file):
    """The others take it once the claim has run out, and not before."""
    site.paths["/a"] = answer()
    store = MemoryStore()
    store.shared = True
    now = time.time()
    await store.jobs.write([write(delivery(url=site.url("/a", host="hooks.test"), create_time=now, due=now))])
    await store.deliveries.claim("hooks.test", now, owner="server-lost", until=now + 0.5, limit=1)
    async with running(site, store, file, server="server-2"):
        await asyncio.sleep(0.3)
        assert site.asked == []
        assert (await ended(store)).outcome is Outcome.DELIVERED


async def test_retries_go_on_after_a_restart(site, file, tmp_path):
    store = SqlStore.sqlite(tmp_path / "jobs.db")
    await store.open()
    await store.jobs.write([write(delivery(url=site.url("/a", host="hooks.test"), create_time=time.time()))])
    site.paths["/a"] = answer(status="500 Oops")
    async with running(site, store, file):
        await until(lambda: len(site.asked) == 2)
    await store.close()
    await store.open()
    (found,) = await store.deliveries.of("job_1")
    assert (found.outcome, found.last_error) == (Outcome.PENDING, "it answered with HTTP status 500")
    assert found.attempts in (1, 2)
    site.paths["/a"] = answer()
    async with running(site, store, file):
        done = await ended(store)
    assert (done.outcome, done.attempts) == (Outcome.DELIVERED, found.attempts + 1)
    await store.close()
