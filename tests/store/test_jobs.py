import asyncio

import pytest

from omni_grpc.config import EngineConfig, LimitsConfig
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.store.job import Job, new_job_id, new_record
from omni_grpc.store.records import JobSpec, JobState
from omni_grpc.store.storage import Storage
from omni_grpc.types.errors import FailedPrecondition
from omni_grpc.types.events import Cancelled, Queued
from omni_grpc.types.request import Draft
from omni_grpc.types.results import Stats
from tests.toy import toy_checkpoint


def job(**options):
    draft = Draft(model="toy", prompt="x")
    resolved = resolve_request(draft, ServingFacts(toy_checkpoint(), LimitsConfig()), id=new_job_id())
    return Job(new_record(JobSpec(request=resolved.request), **options))


END = Cancelled(reason="", completed_steps=0, stats=Stats())


def test_ids_are_unique_and_sort_by_time():
    ids = [new_job_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert [i[:14] for i in ids] == sorted(i[:14] for i in ids)
    assert all(len(i) == 30 for i in ids)


def test_a_finished_job_takes_no_more_events():
    it = job()
    it.append(END)
    with pytest.raises(FailedPrecondition):
        it.append(Queued(position=0, queue_depth=1))
    assert it.last_seq == 1


async def test_waiting_ends_with_the_next_event_for_every_waiter():
    it = job()
    it.append(Queued(position=0, queue_depth=1))
    assert await it.wait(0)
    waiters = [asyncio.ensure_future(it.wait(1)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)
    it.append(END)
    assert await asyncio.gather(*waiters) == [True] * 3


async def test_waiting_gives_up_after_its_timeout_and_leaves_nothing_behind():
    it = job()
    assert not await it.wait(0, timeout=0.01)
    assert it._waiters == set()


def test_listing_is_newest_first_and_filters():
    jobs = Storage(EngineConfig.from_settings(model="toy")).jobs
    first, second = job(labels={"team": "a", "x": "1"}), job(labels={"team": "b"})
    jobs.add(first)
    jobs.add(second)
    assert jobs.newest() == [second, first]
    assert jobs.newest(labels={"team": "a"}) == [first]
    assert jobs.newest(labels={"team": "a", "x": "2"}) == []
    first.append(END)
    assert jobs.newest(states=(JobState.CANCELLED,)) == [first]
    assert jobs.finished() == [first]
