"""What an engine keeps apart: jobs, idempotency keys, bytes and figures of one tenant from those of another."""

import asyncio
import collections

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, JobState, Share
from omni_grpc.engine.inputs import InputStore
from omni_grpc.engine.status import TenantStats
from omni_grpc.store.assets import Assets
from omni_grpc.store.forgotten import Forgotten
from omni_grpc.store.memory import MemoryBlobs, MemoryStore
from omni_grpc.types.errors import Aborted, ResourceExhausted
from omni_grpc.types.plan import SharedBytes
from tests.engine.manual import ask, png, run_through, started_engine
from tests.server.fake_executor import FakeExecutor
from tests.server.service import until
from tests.store.test_assets import put
from tests.toy import toy_checkpoint


async def test_two_tenants_use_one_request_id_and_never_see_each_others_job():
    engine, worker = await started_engine()
    one = ask(engine, tenant="a", subject="alice", request_id="r", fingerprint=b"1")
    other = ask(engine, tenant="b", request_id="r", fingerprint=b"2")
    assert (one.tenant, one.record.subject, other.tenant, other.record.subject) == ("a", "alice", "b", "")
    assert one is not other
    assert ask(engine, tenant="b", request_id="r", fingerprint=b"2") is other
    with pytest.raises(Aborted) as caught:
        ask(engine, tenant="a", request_id="r", fingerprint=b"2")
    assert caught.value.failure.metadata["job_id"] == one.id
    run_through(worker, one)
    await engine.storage.delete(one)
    assert ask(engine, tenant="b", request_id="r", fingerprint=b"2") is other
    assert ask(engine, tenant="a", request_id="r", fingerprint=b"2") not in (one, other)


async def test_the_newest_jobs_of_one_tenant_of_nobody_and_of_all():
    engine, _ = await started_engine()
    jobs = [ask(engine, tenant=tenant, labels={"x": "1"}) for tenant in ("a", "b", "", "a")]
    assert engine.jobs.newest() == jobs[::-1]
    assert engine.jobs.newest(tenant="a") == [jobs[3], jobs[0]]
    assert engine.jobs.newest(tenant="") == [jobs[2]]
    assert engine.jobs.newest(tenant="c") == []
    engine.cancel(jobs[3].id, "")
    assert engine.jobs.newest(tenant="a", states=(JobState.CANCELLED,), labels={"x": "1"}) == [jobs[3]]


async def test_bytes_and_figures_are_counted_by_tenant_and_come_back_to_nothing():
    engine, worker = await started_engine(max_num_seqs=1)
    first, second = ask(engine, tenant="a"), ask(engine, tenant="a")
    third = ask(engine, tenant="b")
    assert engine.stats().tenants == {"a": TenantStats(queued=1, running=1), "b": TenantStats(queued=1)}
    run_through(worker, first)
    asset = await put(engine.assets, b"12345", "image/png", tenant="b")
    engine.inputs.of("b").reserve([SharedBytes("never-made", 7)])
    # a has had steps, b has not: it is b's turn
    assert engine.tenant_stats("a") == TenantStats(queued=1, artifact_bytes=len(png()))
    assert engine.tenant_stats("b").running == 1
    assert engine.tenant_stats("b").asset_bytes == 5
    assert engine.tenant_stats("b").input_bytes == 7
    assert engine.tenant_stats("nobody") == TenantStats()
    for job in (second, third):
        engine.cancel(job.id, "")
    await engine.storage.delete(first)
    await engine.assets.delete(asset.id)
    engine.inputs.of("b").free_blocks(["never-made"])
    await asyncio.to_thread(engine.inputs.close)
    assert engine.tenant_stats("a") == engine.tenant_stats("b") == TenantStats()
    assert engine.stats().tenants == {}


async def test_an_upload_counts_for_its_tenant_while_it_arrives_and_until_it_expires():
    now = [0.0]
    assets = Assets(
        MemoryStore().files, MemoryBlobs(), Forgotten("here"), budget=100, retention=10.0, clock=lambda: now[0]
    )
    async with assets.reserved(30, tenant="a"):
        assert (assets.asset_bytes("a"), assets.asset_bytes("b")) == (30, 0)
    assert assets.asset_bytes("a") == 0
    assert (await put(assets, bytes(20), "video/mp4", tenant="a")).tenant == "a"
    asset = await put(assets, bytes(5), "video/mp4", tenant="b")
    assert (await assets.use(asset.id)).tenant == "b"
    assert (assets.asset_bytes("a"), assets.asset_bytes("b")) == (20, 5)
    now[0] = 11.0
    await assets.sweep()
    assert (assets.asset_bytes("a"), assets.asset_bytes("b")) == (0, 0)


def test_inputs_that_find_no_room_count_for_nobody():
    store = InputStore(10)
    store.of("a").reserve([SharedBytes("x", 6)])
    with pytest.raises(ResourceExhausted):
        store.of("b").reserve([SharedBytes("y", 6)])
    assert (store.input_bytes("a"), store.input_bytes("b")) == (6, 0)
    store.close()


async def test_a_tenant_with_many_outputs_does_not_drive_out_those_of_another():
    engine, worker = await started_engine(artifact_budget=3 * len(png()))
    old = ask(engine, tenant="small")
    run_through(worker, old)
    many = [ask(engine, tenant="large") for _ in range(5)]
    for job in many:
        run_through(worker, job)
    assert old.id in engine.jobs
    assert [job.id in engine.jobs for job in many] == [False, False, False, True, True]
    assert engine.artifacts.artifact_bytes("large") == 2 * len(png())


async def test_a_real_engine_serves_steps_by_weight():
    """Three to one, counted in the plans that the worker got, while both have jobs of one size all the time."""
    config = EngineConfig.from_settings(model="toy", max_num_seqs=4)
    executor = FakeExecutor()
    engine = Engine(config, toy_checkpoint(), executor)
    await engine.start()
    engine.share_by(lambda tenant: Share(weight=3.0 if tenant == "a" else 1.0))
    owners = {}
    for tenant in ("b", "a"):
        for _ in range(40):
            job = ask(engine, tenant=tenant, steps=10, width=64, height=64)
            owners[job.id] = tenant

    def steps():
        return collections.Counter(owners[job_id] for plan in executor.plans for job_id in plan.step)

    await until(lambda: steps()["a"] >= 300)
    taken = steps()
    assert taken["a"] / taken["b"] == pytest.approx(3.0, rel=0.1)
    assert engine.stats().tenants["b"].queued > 0, "b had work all the time"
    await engine.close()


async def test_a_tenant_at_its_limit_starts_no_more_until_one_ends_or_the_limit_rises():
    engine, worker = await started_engine()
    engine.share_by(lambda tenant: Share(max_running=1))
    first, second = ask(engine, tenant="a"), ask(engine, tenant="a")
    worker.prepared(first.id)
    assert second.state is JobState.QUEUED
    other = ask(engine, tenant="b")
    assert (other.state, engine.queue_position(second)) == (JobState.RUNNING, 0)
    worker.prepared(other.id)
    engine.share_by(lambda tenant: Share(max_running=2))
    assert second.state is JobState.RUNNING
