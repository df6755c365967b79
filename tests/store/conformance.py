"""What every store does, whatever it is made of. The fixture `store` is an open one without rows; `opening` opens
another on the same rows where the store is shared, and is the same one in memory.
"""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from omni_grpc.store.records import (
    ArtifactRow,
    Asset,
    Cause,
    Counts,
    JobQuery,
    JobSpec,
    JobState,
    JobWrite,
    KeptInput,
)
from omni_grpc.store.seam import Store
from omni_grpc.types import events
from tests.store.samples import SPEC, full, new, queued, record
from tests.webhooks import owed

RUNNING, FAILED, SUCCEEDED = JobState.RUNNING, JobState.FAILED, JobState.SUCCEEDED


def ids(found: list) -> list[str]:
    return [one.record.id for one in found]


def change(number: int = 0, entries=(), artifacts=(), **changes) -> JobWrite:
    return JobWrite(record=record(number, **changes), entries=entries, artifacts=artifacts)


def output(number: int, job: int = 0, tenant: str = "", size: int = 10) -> ArtifactRow:
    return ArtifactRow(
        artifact_id=f"output-{number}",
        job_id=f"job-{job:04}",
        tenant=tenant,
        size_bytes=size,
        create_time=float(number),
    )


def upload(number: int, tenant: str = "", expire_time: float = 100.0) -> Asset:
    return Asset(
        id=f"upload-{number}",
        mime_type="image/png",
        size_bytes=7,
        sha256="ab" * 32,
        create_time=float(number),
        expire_time=expire_time,
        tenant=tenant,
    )


class Writing:
    async def test_a_job_comes_back_as_it_was_written(self, store: Store) -> None:
        spec = full(JobSpec)
        spec = dataclasses.replace(spec, request=dataclasses.replace(spec.request, inputs=SPEC.request.inputs))
        odd = "it's \0 \\0 \\ \N{SNOWMAN} \N{PILE OF POO}"
        one = record(
            spec=spec,
            tenant=odd,
            subject=odd,
            client_job_id=odd,
            request_id=odd,
            labels={odd: odd, "": ""},
            fingerprint=bytes(range(256)),
            priority=-3,
            start_time=0.1 + 0.2,
            create_time=1786300000.123456,
            expire_time=2e9,
            reserved_seq=2**40,
            restarts=2,
            cancel_reason=odd,
        )
        write = JobWrite(record=one, entries=(queued(1), queued(5)), created=True)
        rejected = await store.jobs.write([write])
        assert not rejected.taken
        assert not rejected.lost
        (found,) = await store.jobs.read([one.id])
        assert found.record == one
        assert found.entries == (queued(1), queued(5))

    async def test_a_batch_may_be_empty(self, store: Store) -> None:
        rejected = await store.jobs.write([])
        assert not rejected.taken
        assert not rejected.lost

    async def test_an_update_replaces_the_record_and_adds_to_the_log(self, store: Store) -> None:
        await store.jobs.write(new(record(labels={"a": "b"})))
        later = change(
            state=RUNNING, start_time=5.0, reserved_seq=9, priority=2, labels={"a": "c"}, entries=(queued(2),)
        )
        assert not (await store.jobs.write([later])).lost
        (found,) = await store.jobs.read(["job-0000"])
        assert found.record == later.record
        assert found.entries == (queued(1), queued(2))
        assert ids(await store.jobs.page(JobQuery(labels={"a": "c"}))) == ["job-0000"]
        assert await store.jobs.page(JobQuery(labels={"a": "b"})) == []

    async def test_another_servers_job_is_lost_and_stays_as_it_is(self, store: Store) -> None:
        await store.jobs.write(new(record(0), record(1)))
        mine, other = change(1, state=RUNNING), change(0, state=FAILED, server="two", entries=(queued(2),))
        other = dataclasses.replace(other, artifacts=(output(1),))
        rejected = await store.jobs.write([other, mine, change(7)])
        assert set(rejected.lost) == {"job-0000", "job-0007"}
        assert not rejected.taken
        zero, one = await store.jobs.read(["job-0000", "job-0001"])
        assert (zero.record, zero.entries) == (record(0), (queued(),))
        assert one.record.state is RUNNING
        assert await store.files.artifact("output-1") is None

    async def test_a_request_id_makes_one_job_per_tenant(self, store: Store) -> None:
        await store.jobs.write(new(record(0, request_id="r", tenant="a")))
        batch = new(
            record(1, request_id="r", tenant="a", labels={"x": "y"}),
            record(2, request_id="r", tenant="b"),
            record(4, request_id="s", tenant="b"),
            record(3, request_id="s", tenant="b"),
            record(5),
            record(6),
        )
        rejected = await store.jobs.write(batch)
        assert rejected.taken == {"job-0001": "job-0000", "job-0003": "job-0004"}
        assert not rejected.lost
        assert ids(await store.jobs.page(JobQuery())) == ["job-0006", "job-0005", "job-0004", "job-0002", "job-0000"]
        assert await store.jobs.page(JobQuery(labels={"x": "y"})) == []
        assert await store.jobs.entries("job-0001") == []
        assert await store.jobs.find("a", "r") == "job-0000"
        assert await store.jobs.find("b", "r") == "job-0002"
        assert await store.jobs.find("c", "r") is None
        assert await store.jobs.find("", "") is None

    async def test_a_request_id_is_free_again_when_its_job_is_gone(self, store: Store) -> None:
        await store.jobs.write(new(record(0, request_id="r")))
        await store.jobs.delete(["job-0000"], Cause.DELETED)
        assert not (await store.jobs.write(new(record(1, request_id="r")))).taken
        assert await store.jobs.find("", "r") == "job-0001"

    async def test_a_write_may_be_repeated(self, store: Store) -> None:
        """Whoever gets no reply does not know whether it was committed."""
        batch = new(record(0, request_id="r", labels={"a": "b"}), record(1))
        batch[0] = dataclasses.replace(batch[0], artifacts=(output(1),))
        await store.jobs.write(batch)
        first = dataclasses.replace(batch[0], record=dataclasses.replace(batch[0].record, state=RUNNING))
        again = await store.jobs.write([first, batch[1]])
        assert not again.taken
        assert not again.lost
        (found,) = await store.jobs.read(["job-0000"])
        assert (found.record.state, found.entries) == (RUNNING, (queued(),))
        assert len(await store.jobs.page(JobQuery(labels={"a": "b"}))) == 1

    async def test_entries_after_a_seq(self, store: Store) -> None:
        await store.jobs.write([JobWrite(record=record(), entries=tuple(map(queued, (1, 2, 7, 11))), created=True)])
        assert await store.jobs.entries("job-0000", 2) == [queued(7), queued(11)]
        assert await store.jobs.entries("job-0000", 11) == []
        assert await store.jobs.entries("nobody") == []

    async def test_reading_keeps_the_order_and_leaves_out_what_is_not_there(self, store: Store) -> None:
        await store.jobs.write(new(*map(record, range(3))))
        assert ids(await store.jobs.read(["job-0002", "nobody", "job-0000"])) == ["job-0002", "job-0000"]
        assert await store.jobs.read([]) == []


class Lists:
    async def test_pages_are_newest_first_and_stable(self, store: Store) -> None:
        await store.jobs.write(new(*(record(number, create_time=float(number // 3)) for number in range(10))))
        first = await store.jobs.page(JobQuery(limit=4))
        assert ids(first) == ["job-0009", "job-0008", "job-0007", "job-0006"]
        await store.jobs.write(new(record(11, create_time=99.0)))
        last = first[-1].record
        second = await store.jobs.page(JobQuery(limit=4, after=(last.create_time, last.id)))
        assert ids(second) == ["job-0005", "job-0004", "job-0003", "job-0002"]
        assert second[0].entries == (queued(),)

    @pytest.mark.parametrize("tenant", ["a", None])
    async def test_filters_fit_alone_and_together(self, store: Store, tenant: str | None) -> None:
        states = [JobState.QUEUED, RUNNING, SUCCEEDED]
        every = [
            record(
                number,
                tenant="ab"[number % 2 if tenant else 0],
                state=states[number % 3],
                model=f"model-{number % 2 + number % 5}",
                labels={"color": ["red", "blue"][number % 2 ^ number // 2 % 2], "n": str(number % 4)},
            )
            for number in range(40)
        ]
        await store.jobs.write(new(*every))
        queries = [
            JobQuery(tenant=tenant, states=chosen, labels=labels, model=model, created_from=least, created_before=most)
            for chosen in ((), (RUNNING,), (RUNNING, SUCCEEDED), (FAILED,), tuple(JobState))
            for labels in ({}, {"color": "red"}, {"color": "red", "n": "1"}, {"color": "green"})
            for model in ("", "model-2")
            for least, most in ((None, None), (5.0, 30.0))
        ]
        found_any = 0
        for query in queries:
            fitting = [
                one
                for one in every
                if query.tenant in (None, one.tenant)
                and (not query.states or one.state in query.states)
                and query.labels.items() <= one.labels.items()
                and query.model in ("", one.model)
                and (query.created_from is None or query.created_from <= one.create_time)
                and (query.created_before is None or one.create_time < query.created_before)
            ]
            assert await store.jobs.count(query) == len(fitting), query
            expected = [one.id for one in reversed(fitting)]
            assert ids(await store.jobs.page(query)) == expected, query
            found_any += len(fitting) > 2
            if len(fitting) > 2:
                after = (fitting[-2].create_time, fitting[-2].id)
                following = dataclasses.replace(query, after=after, limit=1)
                assert ids(await store.jobs.page(following)) == expected[2:3], query
                assert await store.jobs.count(following) == len(fitting), query
        assert found_any > 15

    async def test_unfinished_jobs_of_a_server(self, store: Store) -> None:
        await store.jobs.write(
            new(record(3), record(1, state=RUNNING), record(2, state=SUCCEEDED), record(0, server="two"))
        )
        assert await store.jobs.unfinished("one") == ["job-0001", "job-0003"]
        assert await store.jobs.unfinished("nobody") == []
        await store.jobs.write([change(3, state=JobState.CANCELLED)])
        assert await store.jobs.unfinished("one") == ["job-0001"]

    async def test_jobs_before_one_on_other_servers(self, store: Store) -> None:
        others = [
            record(1, server="two"),
            record(2, server="two", priority=5),
            record(9, server="two", priority=1),
            record(8, server="two"),
            record(3, server="two", model="another"),
            record(4, server="two", state=RUNNING),
            record(5),
        ]
        await store.jobs.write(new(*others))
        assert await store.jobs.queued_before(record(7)) == 3
        assert await store.jobs.queued_before(record(7, priority=1)) == 1
        assert await store.jobs.queued_before(record(7, priority=9)) == 0

    async def test_expired_jobs_the_earliest_first(self, store: Store) -> None:
        times = (50.0, 20.0, 30.0, None)
        await store.jobs.write(new(*(record(number, expire_time=at) for number, at in enumerate(times))))
        assert await store.jobs.expired(30.0, 10) == ["job-0001", "job-0002"]
        assert await store.jobs.expired(99.0, 1) == ["job-0001"]

    async def test_the_oldest_outputs_of_a_tenant(self, store: Store) -> None:
        made = new(
            record(0, tenant="a", end_time=9.0, state=SUCCEEDED),
            record(1, tenant="a", end_time=8.0, state=SUCCEEDED),
            record(2, tenant="a"),
            record(3, tenant="a", end_time=1.0, state=FAILED),
            record(4, tenant="b", end_time=2.0, state=SUCCEEDED),
        )
        for number in (0, 1, 2, 4):
            row = output(number, number, made[number].record.tenant)
            made[number] = dataclasses.replace(made[number], artifacts=(row,))
        await store.jobs.write(made)
        assert await store.jobs.oldest("a", 10) == ["job-0001", "job-0000"]
        assert await store.jobs.oldest("a", 1) == ["job-0001"]


class Cancelling:
    async def test_a_reason_is_written_once_and_an_update_leaves_it(self, store: Store) -> None:
        await store.jobs.write(new(record(0), record(1)))
        first = await store.jobs.request_cancel("job-0000", "bored")
        assert first is not None
        assert first.cancel_reason == "bored"
        second = await store.jobs.request_cancel("job-0000", "another")
        assert second is not None
        assert second.cancel_reason == "bored"
        await store.jobs.write([change(0, state=RUNNING)])
        assert await store.jobs.cancelled("one") == [("job-0000", "bored")]
        assert await store.jobs.cancelled("two") == []
        await store.jobs.write([change(0, state=JobState.CANCELLED, end_time=5.0)])
        assert await store.jobs.cancelled("one") == []
        (found,) = await store.jobs.read(["job-0000"])
        assert found.record.cancel_reason == "bored"

    async def test_a_job_that_has_ended_or_that_there_is_not(self, store: Store) -> None:
        await store.jobs.write(new(record(0, state=SUCCEEDED)))
        ended = await store.jobs.request_cancel("job-0000", "late")
        assert ended is not None
        assert ended.cancel_reason is None
        assert await store.jobs.request_cancel("nobody", "x") is None


class Deleting:
    async def test_a_job_goes_with_all_that_it_has(self, store: Store) -> None:
        spec = dataclasses.replace(SPEC, inputs=(KeptInput(blob="in-1", path="image", name="images"),))
        one = JobWrite(
            record=record(0, tenant="a", labels={"x": "y"}, spec=spec),
            entries=(queued(),),
            artifacts=(output(1, 0, "a"),),
            created=True,
        )
        await store.jobs.write([one, *new(record(1))])
        assert await store.files.owned(["output-1", "in-1", "nobody"]) == {"output-1", "in-1"}
        assert sorted(await store.jobs.delete(["job-0000", "nobody"], Cause.EXPIRED)) == ["in-1", "output-1"]
        assert ids(await store.jobs.page(JobQuery())) == ["job-0001"]
        assert await store.jobs.entries("job-0000") == []
        assert await store.jobs.page(JobQuery(labels={"x": "y"})) == []
        assert await store.files.artifacts() == []
        assert await store.files.owned(["output-1", "in-1"]) == set()
        assert await store.files.cause("job-0000") == (Cause.EXPIRED, "a")
        assert await store.files.cause("output-1") == (Cause.EXPIRED, "a")
        assert await store.files.cause("nobody") is None
        assert await store.jobs.delete([], Cause.DELETED) == []

    async def test_a_blob_of_somebody_else_is_not_given_away(self, store: Store) -> None:
        def spec(blob: str) -> JobSpec:
            return dataclasses.replace(SPEC, inputs=(KeptInput(blob=blob, path="image", name="images"),))

        await store.files.put_asset(upload(1))
        jobs = [record(0, spec=spec("shared")), record(1, spec=spec("shared")), record(2, spec=spec("upload-1"))]
        await store.jobs.write(new(*jobs))
        assert await store.jobs.delete(["job-0000", "job-0002"], Cause.DELETED) == []
        assert await store.jobs.delete(["job-0001"], Cause.DELETED) == ["shared"]

    async def test_names_are_forgotten_and_the_first_cause_stays(self, store: Store) -> None:
        await store.jobs.write(new(record(0)))
        await store.jobs.delete(["job-0000"], Cause.EXPIRED)
        await store.jobs.write(new(record(0)))
        await store.jobs.delete(["job-0000"], Cause.DELETED)
        await store.files.forget_names(1.0)
        assert await store.files.cause("job-0000") == (Cause.EXPIRED, "")
        await store.files.forget_names(4e9)
        assert await store.files.cause("job-0000") is None


class Files:
    async def test_outputs_newest_first(self, store: Store) -> None:
        rows = [output(number, number % 2, "ab"[number % 2], size=number) for number in range(5)]
        made = new(record(0, tenant="a"), record(1, tenant="b"))
        for job in (0, 1):
            made[job] = dataclasses.replace(made[job], artifacts=tuple(rows[job::2]))
        await store.jobs.write(made)
        assert await store.files.artifacts() == rows[::-1]
        assert await store.files.artifacts(limit=2, after=(3.0, "output-3")) == [rows[2], rows[1]]
        assert await store.files.artifacts(tenant="b") == [rows[3], rows[1]]
        assert await store.files.artifacts(job_id="job-0000") == [rows[4], rows[2], rows[0]]
        assert await store.files.artifact("output-3") == rows[3]
        assert await store.files.artifact_bytes() == {"a": 6, "b": 4}

    async def test_an_output_that_is_deleted(self, store: Store) -> None:
        made = new(record(0, tenant="a"))
        await store.jobs.write([dataclasses.replace(made[0], artifacts=(output(1, 0, "a"),))])
        await store.files.delete_artifact("output-1", Cause.DELETED)
        await store.files.delete_artifact("nobody", Cause.DELETED)
        assert await store.files.artifact("output-1") is None
        assert await store.files.cause("output-1") == (Cause.DELETED, "a")
        assert await store.files.cause("nobody") is None

    async def test_uploads(self, store: Store) -> None:
        one, two = upload(1, "a", 50.0), upload(2, "b", 40.0)
        await store.files.put_asset(one)
        await store.files.put_asset(two)
        await store.files.put_asset(dataclasses.replace(two, size_bytes=9))
        assert await store.files.asset("upload-1") == one
        assert await store.files.asset_bytes() == {"a": 7, "b": 9}
        assert await store.files.expired_assets(50.0, 10) == ["upload-2", "upload-1"]
        assert await store.files.expired_assets(50.0, 1) == ["upload-2"]
        await store.files.touch_asset("upload-2", 90.0)
        await store.files.touch_asset("nobody", 90.0)
        assert await store.files.expired_assets(50.0, 10) == ["upload-1"]
        assert await store.files.owned(["upload-1", "x"]) == {"upload-1"}
        await store.files.delete_asset("upload-1", Cause.EXPIRED)
        await store.files.delete_asset("nobody", Cause.EXPIRED)
        assert await store.files.asset("upload-1") is None
        assert await store.files.cause("upload-1") == (Cause.EXPIRED, "a")

    async def test_rows_are_counted(self, store: Store) -> None:
        assert await store.counts() == Counts()
        await store.jobs.write(new(record(1), record(2)))
        await store.jobs.write([change(1, artifacts=[output(1, 1), output(2, 1)])])
        await store.jobs.write([owed.write(one := owed.delivery("job_9")), owed.write(owed.delivery("job_8"))])
        await store.files.put_asset(upload(1))
        assert await store.counts() == Counts(jobs=4, artifacts=2, assets=1, owed=2)
        await store.deliveries.done(one.id, 20.0, 1)
        assert (await store.counts()).owed == 1


class ServersOnOneStore:
    async def test_a_server_is_known_from_its_first_beat_on(self, store: Store) -> None:
        assert await store.servers.beat("one", 10.0, 20.0) is False
        assert await store.servers.beat("one", 15.0, 25.0) is True
        assert await store.servers.alive(25.0) == ["one"]
        assert await store.servers.alive(25.5) == []

    async def test_the_jobs_of_a_dead_server_are_taken_over_once(self, store: Store) -> None:
        for name, until in (("one", 20.0), ("two", 50.0), ("three", 50.0)):
            await store.servers.beat(name, 10.0, until)
        jobs = [record(2), record(1, state=RUNNING), record(3, state=SUCCEEDED), record(4, server="three")]
        await store.jobs.write(new(*jobs))
        assert await store.servers.take_over("two", 20.0) == []
        assert await store.servers.take_over("two", 21.0) == ["job-0001", "job-0002"]
        assert await store.servers.take_over("two", 21.0) == []
        (found,) = await store.jobs.read(["job-0001"])
        assert found.record == record(1, state=RUNNING, server="two", restarts=1)
        assert set((await store.jobs.write([change(1, state=FAILED)])).lost) == {"job-0001"}
        assert await store.servers.beat("one", 30.0, 40.0) is False

    async def test_a_server_that_leaves_gives_its_jobs_away_at_once(self, store: Store) -> None:
        await store.servers.beat("one", 10.0, 1e12)
        await store.servers.beat("two", 10.0, 1e12)
        await store.jobs.write(new(record(1)))
        await store.servers.leave("one")
        assert await store.servers.alive(10.0) == ["two"]
        assert await store.servers.take_over("two", 11.0) == ["job-0001"]

    async def test_a_job_of_a_server_that_nobody_knows_is_taken_over_too(self, store: Store) -> None:
        """One that lost its jobs to others may make another before it notices."""
        await store.servers.beat("two", 10.0, 50.0)
        await store.jobs.write(new(record(1, server="ghost")))
        assert await store.servers.take_over("two", 11.0) == ["job-0001"]

    async def test_two_servers_share_out_what_others_left(self, store: Store, opening) -> None:
        if not store.shared:
            pytest.skip("one server alone uses it")
        other = await opening()
        dead = [f"dead-{number}" for number in range(6)]
        for name in dead:
            await store.servers.beat(name, 1.0, 5.0)
        await store.jobs.write(new(*(record(number, server=dead[number % 6]) for number in range(60))))
        for name in ("two", "three"):
            await store.servers.beat(name, 1.0, 1e12)
        pairs = [(one, name) for _ in range(4) for one, name in ((store, "two"), (other, "three"))]
        taken = await asyncio.gather(*(one.servers.take_over(name, 10.0) for one, name in pairs))
        every = [job_id for some in taken for job_id in some]
        every += await store.servers.take_over("two", 10.0)
        assert sorted(every) == [f"job-{number:04}" for number in range(60)]
        assert {one.record.restarts for one in await store.jobs.page(JobQuery(limit=99))} == {1}

    async def test_one_request_id_on_two_servers_makes_one_job(self, store: Store, opening) -> None:
        if not store.shared:
            pytest.skip("one server alone uses it")
        other = await opening()

        async def make(one: Store, first: int) -> dict[str, str]:
            batch = [record(first + number, request_id=f"r{number}") for number in range(20)]
            return dict((await one.jobs.write(new(*batch))).taken)

        taken = await asyncio.gather(make(store, 0), make(other, 100))
        assert sum(map(len, taken)) == 20
        assert await store.jobs.count(JobQuery()) == 20
        for job_id, owner in {**taken[0], **taken[1]}.items():
            assert ids(await store.jobs.read([job_id, owner])) == [owner]


class Events:
    @pytest.mark.parametrize("event", events.Event.__args__, ids=lambda kind: kind.__name__)
    async def test_an_event_comes_back_as_it_was(self, store: Store, event: type) -> None:
        entry = dataclasses.replace(queued(), event=full(event))
        await store.jobs.write([JobWrite(record=record(), entries=(entry,), created=True)])
        assert await store.jobs.entries("job-0000") == [entry]
