"""A server takes over from another one of the same database: what waits goes on there, before the eyes of watchers."""

import asyncio

import pytest

from omni_grpc.engine.scheduler import Lane
from tests.lasting.lives import kept, stepping
from tests.server.service import until

pytestmark = pytest.mark.service


async def test_what_waits_goes_on_at_the_next_server_and_what_runs_ends_where_it_is(shared, tmp_path):
    settings = {"max_num_seqs": 1, "handover": str(tmp_path / "next.sock"), "handover_seconds": 1}
    first = await shared.start(**settings)
    first.executor.gates[Lane.STEP].close()
    runs, waits = await first.create(), await first.create()
    await stepping(first, runs.job_id)

    async def leave():
        await first.server.succeeded()
        await first.server.retire()
        await first.stop(30)

    leaving = asyncio.create_task(leave())
    second = await shared.start(**settings)
    assert second.server.port == first.server.port
    assert not leaving.done(), "the job that runs ends first"
    watching = [asyncio.create_task(second.watch(job.job_id)) for job in (runs, waits)]
    await until(lambda: first.engine.ending)
    first.executor.gates[Lane.STEP].open()
    await asyncio.wait_for(leaving, 60)
    async with asyncio.timeout(60):
        events = [await one for one in watching]
    assert [kept(one)[-1] for one in events] == ["completed"] * 2
    made_by = [(await second.get(job.job_id)).replica for job in (runs, waits)]
    assert made_by == [life.engine.storage.instance_id for life in (first, second)]
