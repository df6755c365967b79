"""What a broken connection costs: nothing, as long as the server and the job are there."""

import asyncio
import logging

import pytest

from omni_grpc.client import Client, Reconnect
from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import InternalError, Unavailable
from omni_grpc.types.media import ImageFormat
from tests.client.proxy import until
from tests.client.threaded import whole
from tests.server.fake_executor import picture
from tests.server.service import kinds, serving

LARGE = {"width": 1024, "height": 1024, "output_format": "raw_rgb8", "steps": 1}
LARGE_BYTES = 1024 * 1024 * 3


@pytest.mark.parametrize("away", [0, 5], ids=["at once", "after five steps"])
async def test_a_cut_stream_goes_on_without_a_gap_or_an_echo(client, proxy, service, away):
    steps = service.executor.gates[Lane.STEP]
    steps.close()
    events, cuts, missed = [], [5, 12], set()
    async with await client.stream("x", steps=20, seed=2) as stream:
        job = service.engine.jobs.get(stream.job_id)
        async for event in stream:
            events.append(event)
            if cuts and event.seq >= cuts[0]:
                del cuts[0]
                proxy.refuse = True
                proxy.cut()
                missed |= set(range(job.last_seq + 1, job.last_seq + away + 1))
                steps.let(away)  # happens while nobody watches
                await job.wait(job.last_seq + away - 1, None)
                proxy.refuse = False
            if event.WhichOneof("event") in ("encode_done", "step_progress"):
                steps.let(1)
        result = await stream.result()
    assert whole(events)
    assert (events[-1].seq, kinds(events)[-1]) == (job.last_seq, "completed")
    assert missed <= {event.seq for event in events}  # replayed in full
    assert proxy.connections >= 3
    assert result.files == (picture(64, 32, 2, ImageFormat.PNG),)


async def test_a_job_that_ends_while_nobody_watches(client, proxy, service):
    steps = service.executor.gates[Lane.STEP]
    steps.close()
    async with await client.stream("x", seed=2) as stream:
        proxy.refuse = True
        proxy.cut()
        steps.open()
        await service.engine.jobs.get(stream.job_id).wait(8, None)
        proxy.refuse = False
        result = await stream.result()
    assert result.files == (picture(64, 32, 2, ImageFormat.PNG),)


async def test_a_watch_goes_on_too(client, proxy, service):
    steps = service.executor.gates[Lane.STEP]
    steps.close()
    job = await client.create_job("x", steps=3)
    events = []
    async for event in client.watch_job(job.job_id):
        events.append(event)
        if event.HasField("encode_done"):
            proxy.cut()
            steps.open()
    assert whole(events)
    assert events[-1].seq == service.engine.jobs.get(job.job_id).last_seq


async def test_an_output_that_was_cut_off_goes_on_at_its_next_byte(client, proxy, service):
    async with await client.stream("x", seed=3, **LARGE) as stream:
        proxy.cut_after(LARGE_BYTES // 2)
        result = await stream.result()
    assert result.files == (picture(1024, 1024, 3, ImageFormat.RAW_RGB8),)
    assert proxy.connections >= 2


async def test_a_download_that_was_cut_off_goes_on_at_its_next_byte(client, proxy):
    job = await client.create_job("x", seed=3, **LARGE)
    async for event in client.watch_job(job.job_id):
        last = event
    proxy.cut_after(LARGE_BYTES // 2)
    data = await client.download(last.completed.artifacts[0].artifact_id)
    assert data == picture(1024, 1024, 3, ImageFormat.RAW_RGB8)
    assert proxy.connections >= 2


async def test_a_changed_byte_is_found_on_every_way(client, proxy):
    small = {"width": 32, "height": 16, "output_format": "raw_rgb8", "seed": 5}
    good = picture(32, 16, 5, ImageFormat.RAW_RGB8)
    proxy.corrupt(good[100:150])
    with pytest.raises(InternalError) as caught:
        await client.generate_image("x", **small)
    assert caught.value.reason == "ARTIFACT_CORRUPT"
    artifact_id = caught.value.failure.metadata["artifact_id"]
    proxy.corrupt(good[100:150])
    with pytest.raises(InternalError, match="SHA-256"):
        await client.download(artifact_id)
    assert await client.download(artifact_id) == good


async def test_a_server_that_stays_away_is_given_up(kind, proxy, service):
    service.executor.gates[Lane.STEP].close()
    reconnect = Reconnect(attempts=1, first_delay=0.01)
    async with kind(f"127.0.0.1:{proxy.port}", reconnect=reconnect) as client:
        stream = await client.stream("x")
        proxy.refuse = True
        proxy.cut()
        with pytest.raises(Unavailable, match="in 1 attempts") as caught:
            await stream.result()
        await stream.close()
    assert caught.value.reason == "STREAM_LOST"
    assert caught.value.failure.metadata["job_id"] == stream.job_id


async def test_a_server_that_restarted_has_lost_the_job(client, proxy, service):
    service.executor.gates[Lane.STEP].close()
    async with serving() as successor:
        stream = await client.stream("x")
        proxy.target = successor.server.port
        proxy.cut()
        with pytest.raises(Unavailable, match="has restarted") as caught:
            await stream.result()
        await stream.close()
    assert (caught.value.reason, caught.value.failure.retryable) == ("JOB_LOST", True)


async def test_a_job_that_cannot_be_cancelled_is_told_in_a_note(proxy, service):
    service.executor.gates[Lane.STEP].close()

    def leave() -> None:
        with Client(f"127.0.0.1:{proxy.port}") as client, client.stream("x"):
            proxy.refuse = True
            loop.call_soon_threadsafe(proxy.cut)
            raise ZeroDivisionError

    loop = asyncio.get_running_loop()
    with pytest.raises(ZeroDivisionError) as caught:
        await asyncio.to_thread(leave)
    assert "could not be cancelled: cannot reach the server" in caught.value.__notes__[0]


async def test_an_answer_that_was_lost_makes_no_second_job(client, proxy, service, caplog):
    """gRPC sends the request again, and its request_id finds the job that the first one made."""
    caplog.set_level(logging.DEBUG, logger="omni_grpc.server.calls")
    service.executor.gates[Lane.PREPARE].close()
    await client.list_models()  # connected
    proxy.mute = True
    creating = asyncio.ensure_future(client.create_job("x", model="toy"))
    await until(lambda: len(service.engine.jobs))
    proxy.mute = False
    proxy.cut()
    job = await creating
    assert [one.id for one in service.engine.jobs.newest()] == [job.job_id]
    assert sum("CreateJob OK" in record.getMessage() for record in caplog.records) == 2
