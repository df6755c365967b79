"""What a journal writes and shows, and when, over rows that a test holds, fails and slows."""

import asyncio
import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_grpc.store import journal as journal_module
from omni_grpc.store.job import Job
from omni_grpc.store.journal import PROGRESS, RESERVED, Journal, Taken
from omni_grpc.store.memory import MemoryStore
from omni_grpc.store.records import Cause, JobState, Webhook
from omni_grpc.store.seam import StoreError
from omni_grpc.types.errors import Unavailable
from omni_grpc.types.events import Cancelled, EncodeDone, Queued, Started, StepProgress
from omni_grpc.types.results import Stats
from tests.server.service import until
from tests.store.failing import Trouble, Troubled
from tests.store.samples import SPEC, record

QUEUED = Queued(position=0, queue_depth=1)
STARTED = Started(model="tiny", seeds=(7,), width=64, height=64, total_steps=4, queue_wait=0.0)
ENCODED = EncodeDone(elapsed=0.1, prompt_tokens=3)
END = Cancelled(reason="enough", completed_steps=1, stats=Stats())


def step(number=1):
    return StepProgress(
        step=number, total_steps=1000, sigma=0.5, timestep=500.0, step_time=0.1, elapsed=0.1, eta=1.0, rows_total=1
    )


class Desk:
    """A journal over a memory store, with what it was told of. `writes` are the batches that came."""

    def __init__(self, **changes):
        self.trouble = Trouble()
        self.store = MemoryStore()
        rows = Troubled(self.store.jobs, self.trouble, prefix="jobs.")
        self.journal = Journal(rows, server="me", **({"immediate": False} | changes))
        self.lost, self.written, self.progress = [], [], []
        self.journal.on_lost = lambda job: self.lost.append(job.id)
        self.journal.on_written = lambda job, seq: self.written.append((job.id, seq))
        self.journal.on_progress = lambda job, entry: self.progress.append(entry.seq)
        self.batches = []
        self._write = self.store.jobs.write
        self.store.jobs.write = self._seen

    async def _seen(self, writes):
        self.batches.append([write.record.id for write in writes])
        return await self._write(writes)

    def create(self, number=0, **changes):
        job = Job(record(number, **changes))
        self.journal.create(job)
        job.append(QUEUED)
        return job

    async def made(self, number=0, **changes):
        job = self.create(number, **changes)
        await self.journal.acknowledged(job)
        return job

    async def kept(self, job):
        """The kinds of the events that the store has, after all is settled."""
        await self.journal.settled(job.id)
        return [type(entry.event) for entry in await self.store.jobs.entries(job.id)]


@pytest.fixture
async def desk(monkeypatch):
    monkeypatch.setattr(journal_module, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(journal_module, "MAX_RETRY", 0.02)
    desk = Desk()
    desk.journal.start()
    yield desk
    desk.trouble.mend()
    await desk.journal.stop(1.0)


def shown(job):
    return [type(entry.event) for entry in job.entries]


async def turns(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_states_are_shown_once_they_are_committed(desk):
    desk.trouble.hold("jobs.write")
    job = desk.create()
    acknowledged = asyncio.ensure_future(desk.journal.acknowledged(job))
    await turns()
    assert (shown(job), acknowledged.done(), desk.journal.creating(job.id)) == ([], False, True)
    desk.trouble.mend()
    await acknowledged
    assert (shown(job), desk.journal.creating(job.id)) == ([Queued], False)
    assert desk.written == [(job.id, 1)]


async def test_progress_is_shown_at_once_but_not_before_a_state_that_waits(desk):
    job = await desk.made()
    job.append(STARTED)
    await desk.journal.settled(job.id)
    job.append(step(1))
    assert (shown(job)[-1], desk.progress) == (StepProgress, [3])
    desk.trouble.hold("jobs.write")
    job.append(ENCODED)
    job.append(step(2))
    await turns()
    assert shown(job) == [Queued, Started, StepProgress]
    # in front of what waits it need not wait either
    desk.trouble.mend()
    await desk.journal.settled(job.id)
    assert shown(job) == [Queued, Started, StepProgress, EncodeDone, StepProgress]
    assert await desk.kept(job) == [Queued, Started, EncodeDone]


async def test_what_comes_while_one_write_is_under_way_is_one_next_write(desk):
    desk.trouble.hold("jobs.write")
    first = desk.create(0)
    await turns()
    others = [desk.create(number) for number in range(1, 30)]
    others[0].append(STARTED)
    desk.trouble.mend()
    await asyncio.gather(*map(desk.journal.acknowledged, [first, *others]))
    assert desk.batches == [[first.id], [job.id for job in others]]
    assert await desk.kept(others[0]) == [Queued, Started]


async def test_no_batch_is_larger_than_the_loop_bears(desk):
    jobs = [desk.create(number) for number in range(150)]
    await asyncio.gather(*map(desk.journal.acknowledged, jobs))
    assert [len(batch) for batch in desk.batches] == [64, 64, 22]


async def test_of_a_new_job_that_is_not_written_nothing_is_left(desk):
    desk.trouble.fail("jobs.write", afterwards=True)
    desk.trouble.fail("jobs.delete")
    job = desk.create()
    with pytest.raises(StoreError):
        await desk.journal.acknowledged(job)
    assert (desk.lost, desk.journal.withdrawn(job.id)) == ([job.id], True)
    assert await desk.store.jobs.read([job.id]), "its commit was not answered, and yet it was done"
    # whatever its engine says until it knows is nobody's
    job.append(STARTED)
    with pytest.raises(Unavailable) as refused:
        desk.journal.check()
    assert (refused.value.failure.reason, refused.value.failure.retry_after) == ("STORE_UNAVAILABLE", 1.0)
    desk.trouble.mend()
    await until(lambda: desk.journal.failure is None)
    desk.journal.check()
    assert not await desk.store.jobs.read([job.id])
    assert not desk.journal.withdrawn(job.id)
    assert (await desk.made(1)).state is JobState.QUEUED


async def test_who_asks_after_the_commit_has_failed_is_told_so(desk):
    desk.trouble.fail("jobs.write")
    job = desk.create()
    await until(lambda: desk.lost == [job.id])
    with pytest.raises(StoreError):
        await desk.journal.acknowledged(job)


async def test_running_jobs_keep_their_events_in_order_until_the_store_is_back(desk):
    job = await desk.made()
    desk.trouble.fail("jobs.write")
    for event in (STARTED, ENCODED, step(1), END):
        job.append(event)
        await asyncio.sleep(0.015)
    assert (shown(job), job.ended) == ([Queued], True)
    with pytest.raises(StoreError):
        await desk.journal.settled(job.id)
    with pytest.raises(Unavailable):
        desk.journal.check()
    desk.trouble.mend()
    await until(lambda: job.state.terminal)
    assert shown(job) == [Queued, Started, EncodeDone, StepProgress, Cancelled]
    assert await desk.kept(job) == [Queued, Started, EncodeDone, Cancelled]
    assert desk.lost == []


async def test_no_seq_is_shown_beyond_what_is_reserved(desk):
    job = await desk.made()
    (stored,) = await desk.store.jobs.read([job.id])
    reserved = stored.record.reserved_seq
    assert reserved == 1 + RESERVED
    desk.trouble.hold("jobs.write")
    for number in range(2 * RESERVED):
        job.append(step(number))
    await turns()
    assert job.last_seq == reserved
    # whoever reads the store now goes on behind all that was ever shown
    (stored,) = await desk.store.jobs.read([job.id])
    again = Job.restored(stored)
    assert again.append(STARTED).seq == reserved + 1
    desk.trouble.mend()
    await desk.journal.settled(job.id)
    assert job.last_seq == 1 + 2 * RESERVED
    (stored,) = await desk.store.jobs.read([job.id])
    assert Job.restored(stored).appended_seq >= job.last_seq


async def test_more_is_reserved_before_progress_has_to_wait(desk):
    job = await desk.made()
    for number in range(4 * RESERVED):
        job.append(step(number))
        assert job.last_seq == job.appended_seq, "it never waits"
        await turns(2)


async def test_an_adopted_job_goes_on_behind_what_was_reserved(desk):
    job = await desk.made()
    job.append(step())
    await desk.journal.settled(job.id)
    (stored,) = await desk.store.jobs.read([job.id])
    again = Job.restored(stored)
    desk.journal.adopt(again)
    again.append(step())
    await desk.journal.settled(job.id)
    assert [entry.seq for entry in again.entries] == [1, stored.record.reserved_seq + 1]


async def test_a_request_id_that_is_taken_names_the_other_job(desk):
    other = await desk.made(0, request_id="once")
    job, third = desk.create(1, request_id="once"), desk.create(2)
    with pytest.raises(Taken) as taken:
        await desk.journal.acknowledged(job)
    await desk.journal.acknowledged(third)
    assert (taken.value.job_id, desk.lost) == (other.id, [job.id])
    assert shown(job) == []
    assert not await desk.store.jobs.read([job.id])


async def test_a_job_that_another_server_has_is_dropped(desk):
    job, other = await desk.made(0), await desk.made(1)
    desk.store.jobs.take_over("another", alive=())
    desk.store.jobs._records[other.id] = dataclasses.replace(desk.store.jobs._records[other.id], server="me")
    job.append(STARTED)
    other.append(STARTED)
    assert await desk.kept(other) == [Queued, Started]
    assert desk.lost == [job.id]
    job.append(END)
    assert await desk.kept(job) == [Queued]
    assert shown(job) == [Queued]


async def test_what_goes_wrong_with_one_job_keeps_no_other_from_being_written(desk, caplog):
    good, bad = await desk.made(0), await desk.made(1)

    def faulty(job):
        raise RuntimeError("an observer's fault")

    desk.journal.on_lost = faulty
    write = desk.store.jobs.write

    async def choosy(writes):
        if any(one.record.id == bad.id for one in writes):
            raise ValueError("a row that cannot be encoded")
        return await write(writes)

    desk.store.jobs.write = choosy
    good.append(STARTED)
    bad.append(STARTED)
    assert await desk.kept(good) == [Queued, Started]
    assert await desk.kept(bad) == [Queued]
    assert "cannot be written" in caplog.text
    assert "an observer's fault" in caplog.text
    assert (await desk.made(2)).state is JobState.QUEUED


async def test_a_webhook_that_cannot_be_written_is_not_the_fault_of_its_job(desk, caplog):
    def faulty(job):
        raise RuntimeError("a body that cannot be rendered")

    desk.journal.owed = faulty
    spec = dataclasses.replace(SPEC, webhook=Webhook(url="https://example.com/hook", states=(JobState.CANCELLED,)))
    job = await desk.made(spec=spec)
    job.append(END)
    assert await desk.kept(job) == [Queued, Cancelled]
    assert "a body that cannot be rendered" in caplog.text


async def test_a_new_job_that_cannot_be_encoded_is_told_so(desk):
    async def choosy(writes):
        raise ValueError("a row that cannot be encoded")

    desk.store.jobs.write = choosy
    job = desk.create()
    with pytest.raises(ValueError, match="encoded"):
        await desk.journal.acknowledged(job)
    assert desk.lost == [job.id]


async def test_stopping_writes_what_waits(desk):
    job = await desk.made()
    desk.trouble.fail("jobs.write")
    job.append(STARTED)
    await asyncio.sleep(0.03)
    desk.trouble.mend()
    job.append(END)
    await desk.journal.stop(2.0)
    assert [type(entry.event) for entry in await desk.store.jobs.entries(job.id)] == [Queued, Started, Cancelled]


async def test_stopping_says_what_it_could_not_write(desk):
    job = await desk.made()
    desk.trouble.fail("jobs.write")
    job.append(STARTED)
    with pytest.raises(StoreError):
        await desk.journal.stop(0.1)


async def test_stopping_deletes_what_was_withdrawn(desk):
    desk.trouble.fail("jobs.write", afterwards=True)
    desk.trouble.fail("jobs.delete")
    job = desk.create()
    with pytest.raises(StoreError):
        await desk.journal.acknowledged(job)
    desk.trouble.mend()
    await desk.journal.stop(2.0)
    assert not await desk.store.jobs.read([job.id])
    assert await desk.store.files.cause(job.id) == (Cause.DELETED, "")


async def test_an_immediate_store_is_written_at_once():
    desk = Desk(immediate=True)
    job = desk.create()
    assert shown(job) == [Queued]
    job.append(step())
    job.append(END)
    assert (shown(job), job.state) == ([Queued, StepProgress, Cancelled], JobState.CANCELLED)
    assert len(await desk.store.jobs.entries(job.id)) == 3, "progress too: it is there as long as the log"
    await desk.journal.acknowledged(job)
    await desk.journal.settled(job.id)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["create", "state", "step", "end", "fail", "unanswered", "hold", "mend", "wait"]),
              st.integers(0, 2)),
    max_size=40,
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTIONS)
def test_whatever_happens_logs_are_shown_in_order_and_nothing_acknowledged_is_lost(actions):
    asyncio.run(_run(actions))


async def _run(actions):
    desk = Desk()
    first, most = journal_module.FIRST_RETRY, journal_module.MAX_RETRY
    journal_module.FIRST_RETRY = journal_module.MAX_RETRY = 0.001
    desk.journal.start()
    jobs, acknowledged, appended = {}, {}, {}
    try:
        for action, number in actions:
            job = jobs.get(number)
            alive = job is not None and not job.ended and job.id not in desk.lost
            if action == "create" and job is None:
                jobs[number] = desk.create(number)
                appended[number] = [Queued]
                acknowledged[number] = asyncio.ensure_future(desk.journal.acknowledged(jobs[number]))
            elif action in ("state", "step", "end") and alive:
                event = {"state": ENCODED, "step": step(), "end": END}[action]
                job.append(event)
                appended[number].append(type(event))
            elif action == "fail":
                desk.trouble.fail("jobs.write", "jobs.delete")
            elif action == "unanswered":
                desk.trouble.fail("jobs.write", afterwards=True)
            elif action == "hold":
                desk.trouble.hold("jobs.write")
            elif action == "mend":
                desk.trouble.mend()
            elif action == "wait":
                await turns(5)
                await asyncio.sleep(0.001)
            for one in jobs.values():
                await _check(desk, one)
        desk.trouble.mend()
        await desk.journal.stop(5.0)
        for number, job in jobs.items():
            await asyncio.wait([acknowledged[number]], timeout=5)
            kept = [type(entry.event) for entry in await desk.store.jobs.entries(job.id)]
            if acknowledged[number].exception() is not None:
                assert (kept, shown(job)) == ([], [])
            else:
                assert shown(job) == appended[number]
                assert kept == [kind for kind in appended[number] if kind not in PROGRESS]
    finally:
        journal_module.FIRST_RETRY, journal_module.MAX_RETRY = first, most


async def _check(desk, job):
    """What a reader of the store would go on from is behind all that was shown, and has every state of it."""
    assert [entry.seq for entry in job.entries] == list(range(1, len(job.entries) + 1))
    stored = await desk.store.jobs.read([job.id])
    if job.entries:
        assert stored[0].record.reserved_seq >= job.last_seq
        states = [entry.seq for entry in job.entries if not isinstance(entry.event, PROGRESS)]
        assert {entry.seq for entry in stored[0].entries} >= set(states)
