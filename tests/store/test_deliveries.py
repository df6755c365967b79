"""What every store does with webhooks that are owed."""

import asyncio
import dataclasses

import pytest

from omni_grpc.store.records import Cause, JobState, Outcome
from tests.webhooks.owed import delivery, record, write


async def claimed(store, now=10.0, host="hooks.test", **changes):
    options = {"owner": "server-1", "until": now + 40, "limit": 9} | changes
    return [one.id for one in await store.deliveries.claim(host, now, **options)]


async def test_a_delivery_comes_back_as_it_was_written(store):
    one = delivery(url="https://hooks.test/a?b=\u00e4", tenant="st\u00fcdio", due=7.25, create_time=6.125)
    await store.jobs.write([write(one)])
    assert await store.deliveries.of("job_1") == [one]
    assert await store.deliveries.claim("hooks.test", 10.0, owner="a", until=50.0, limit=1) == [one]


async def test_it_is_due_from_its_time_on_and_those_that_wait_longest_come_first(store):
    await store.jobs.write([write(delivery("job_1", due=8.0)), write(delivery("job_2", due=6.0))])
    await store.jobs.write([write(delivery("job_3", due=7.0, host="other.test"))])
    assert await store.deliveries.hosts(5.9) == []
    assert await store.deliveries.hosts(6.0) == ["hooks.test"]
    assert await store.deliveries.hosts(8.0) == ["hooks.test", "other.test"]
    assert await claimed(store, 7.9) == ["job_2-succeeded"]
    assert await store.deliveries.hosts(8.0) == ["other.test", "hooks.test"]
    assert await claimed(store, 9.0) == ["job_1-succeeded"]
    assert await claimed(store, 9.0, host="other.test") == ["job_3-succeeded"]
    assert await store.deliveries.hosts(9.0) == []


async def test_a_claim_takes_no_more_than_it_wants(store):
    await store.jobs.write([write(delivery(f"job_{n}", due=float(n))) for n in range(3)])
    assert await claimed(store, limit=2) == ["job_0-succeeded", "job_1-succeeded"]
    assert await claimed(store, limit=2) == ["job_2-succeeded"]


async def test_nobody_else_has_what_is_claimed_until_that_runs_out(store):
    await store.jobs.write([write(delivery())])
    assert await claimed(store, 10.0, until=50.0) == ["job_1-succeeded"]
    assert await claimed(store, 49.9, owner="server-2") == []
    assert await store.deliveries.hosts(49.9) == []
    assert await store.deliveries.hosts(50.0) == ["hooks.test"]
    assert await claimed(store, 50.0, owner="server-2") == ["job_1-succeeded"]


async def test_servers_that_claim_at_once_share_them_out(opening):
    stores = [await opening()]
    if stores[0].shared:
        stores.append(await opening())
    await stores[0].jobs.write([write(delivery(f"job_{n}")) for n in range(40)])

    async def all_of(name, store):
        found = []
        while some := await claimed(store, owner=name, limit=3):
            found += some
        return found

    takers = [all_of(f"server-{n}", stores[n % len(stores)]) for n in range(4)]
    found = [one for taken in await asyncio.gather(*takers) for one in taken]
    assert sorted(found) == sorted(f"job_{n}-succeeded" for n in range(40))


async def test_claims_are_given_back(store):
    await store.jobs.write([write(delivery("job_1"), delivery("job_1", JobState.RUNNING)), write(delivery("job_2"))])
    await claimed(store, limit=2)
    await claimed(store, owner="server-2")
    await store.deliveries.release("server-2")
    assert len(await claimed(store, owner="server-3")) == 1
    await store.deliveries.release("server-1")
    assert len(await claimed(store)) == 2
    await store.deliveries.release()
    assert len(await claimed(store)) == 3


async def test_after_a_failure_it_is_due_later(store):
    await store.jobs.write([write(delivery())])
    await claimed(store, 10.0)
    await store.deliveries.retry("job_1-succeeded", 15.5, 1, "status 500", owner="server-1")
    assert await claimed(store, 15.4) == []
    (found,) = await store.deliveries.claim("hooks.test", 15.5, owner="server-2", until=60.0, limit=1)
    assert found == delivery(due=15.5, attempts=1, last_error="status 500")


async def test_what_is_done_is_done(store):
    await store.jobs.write([write(delivery())])
    await claimed(store)
    await store.deliveries.done("job_1-succeeded", 11.0, 1)
    assert await store.deliveries.hosts(1e9) == []
    done = delivery(outcome=Outcome.DELIVERED, end_time=11.0, attempts=1, body=b"")
    assert await store.deliveries.of("job_1") == [done]
    # whoever had it before says nothing of it any more
    await store.deliveries.retry("job_1-succeeded", 12.0, 2, "x", owner="server-1")
    await store.deliveries.give_up("job_1-succeeded", 12.0, 2, "x", owner="server-1")
    assert await store.deliveries.of("job_1") == [done]
    await store.deliveries.done("job_2-succeeded", 11.0, 1)


async def test_what_is_given_up_keeps_its_reason(store):
    await store.jobs.write([write(delivery())])
    await claimed(store)
    await store.deliveries.give_up("job_1-succeeded", 11.0, 3, "status 410", owner="server-1")
    assert await store.deliveries.hosts(1e9) == []
    (found,) = await store.deliveries.of("job_1")
    assert (found.outcome, found.end_time, found.attempts) == (Outcome.GIVEN_UP, 11.0, 3)
    assert (found.last_error, found.body) == ("status 410", b"")


@pytest.mark.parametrize("lost", ["retry", "give_up"])
async def test_a_server_that_lost_its_claim_changes_nothing(store, lost):
    await store.jobs.write([write(delivery())])
    await claimed(store, 10.0, until=50.0)
    await claimed(store, 60.0, owner="server-2", until=100.0)
    await getattr(store.deliveries, lost)("job_1-succeeded", 61.0, 1, "x", owner="server-1")
    assert await store.deliveries.of("job_1") == [delivery()]
    assert await claimed(store, 99.0) == []
    # that it was delivered is true whoever says it
    await store.deliveries.done("job_1-succeeded", 62.0, 1)
    assert (await store.deliveries.of("job_1"))[0].outcome is Outcome.DELIVERED


async def test_a_state_is_told_of_once(store):
    await store.jobs.write([write(delivery())])
    again = delivery(body=b"again", due=9.0)
    await store.jobs.write([write(again, created=False)])
    assert await store.deliveries.of("job_1") == [delivery()]
    await store.deliveries.done("job_1-succeeded", 11.0, 1)
    await store.jobs.write([write(again, delivery("job_1", JobState.RUNNING, create_time=12.0), created=False)])
    first, second = await store.deliveries.of("job_1")
    assert (first.outcome, second.state) == (Outcome.DELIVERED, JobState.RUNNING)


async def test_a_write_that_is_rejected_owes_nothing(store):
    first = dataclasses.replace(write(delivery()), record=dataclasses.replace(record(), request_id="r"))
    await store.jobs.write([first])
    other = dataclasses.replace(record("job_2"), request_id="r")
    rejected = await store.jobs.write([dataclasses.replace(write(delivery("job_2")), record=other)])
    assert rejected.taken == {"job_2": "job_1"}
    lost = await store.jobs.write([write(delivery("job_1", JobState.FAILED), created=False, server="server-2")])
    assert list(lost.lost) == ["job_1"]
    assert await store.deliveries.of("job_2") == []
    assert await store.deliveries.of("job_1") == [delivery()]


async def test_it_outlives_its_job(store):
    await store.jobs.write([write(delivery())])
    await store.jobs.delete(["job_1"], Cause.EXPIRED)
    assert await claimed(store) == ["job_1-succeeded"]


async def test_those_that_ended_long_ago_are_forgotten(store):
    await store.jobs.write([write(delivery("job_1")), write(delivery("job_2")), write(delivery("job_3"))])
    await store.deliveries.done("job_1-succeeded", 11.0, 1)
    await store.deliveries.done("job_2-succeeded", 13.0, 1)
    await store.deliveries.forget(12.0)
    kept = [await store.deliveries.of(f"job_{n}") for n in (1, 2, 3)]
    assert [len(found) for found in kept] == [0, 1, 1]
