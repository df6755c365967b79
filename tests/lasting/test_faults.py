"""A store that is full, away or slow: what is refused, what goes on, and that nothing acknowledged is lost."""

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from omni_grpc.engine import outputs
from omni_grpc.engine.scheduler import Lane
from omni_grpc.store.seam import StoreError
from omni_grpc.v1 import artifact_pb2, event_pb2, job_pb2
from tests.lasting.lives import FIRST, Ticking, data, kept, place, reason, restarted, stepping
from tests.server.service import image, refusal, until
from tests.server.studio import png
from tests.server.test_assets import messages, upload_refusal
from tests.store.failing import FULL

pytestmark = pytest.mark.service
MOST_PAUSE = 0.5


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Pauses of a server that waits for its store."""
    monkeypatch.setattr("omni_grpc.store.journal.MAX_RETRY", MOST_PAUSE)
    monkeypatch.setattr(outputs, "MAX_RETRY", 0.2)
    monkeypatch.setattr(outputs, "PATIENCE", 1.0)


def create(life, **options):
    return life.jobs.CreateJob(job_pb2.CreateJobRequest(generate_image=image(options=options)))


async def taken_again(life):
    """A job that is made once the server takes some again."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(Exception):
                return (await create(life)).job
            await asyncio.sleep(0.1)


def check_refused(error):
    assert (error.code, error.reason) == ("UNAVAILABLE", "STORE_UNAVAILABLE")
    assert error.details["RetryInfo"].retry_delay.seconds >= 1


async def names(life, prefix=""):
    return [name async for name in life.engine.storage.blobs.names(prefix, time.time() + 10)]


async def test_while_nothing_can_be_written_new_jobs_are_refused_and_others_end(alone):
    life = await alone.start()
    life.executor.gates[Lane.STEP].close()
    running = await life.create()
    await stepping(life, running.job_id)
    async with Ticking() as ticking:
        life.trouble.fail("jobs.write", "jobs.delete")
        for _ in range(3):
            error = await refusal(create(life, request_id="once"))
            check_refused(error)
            assert FULL in error.message
        assert (await life.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs[0].job_id == running.job_id
        assert len(life.engine.jobs) == 1, "nothing is left of those that were refused"
        life.executor.gates[Lane.STEP].open()
        await until(lambda: life.engine.jobs.get(running.job_id).ended)
        assert (await life.get(running.job_id)).state == event_pb2.JOB_STATE_RUNNING, "not committed, not shown"
        # what cannot be committed is not told as if it were
        check_refused(await refusal(life.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=running.job_id))))
        life.trouble.mend()
        assert kept(await asyncio.wait_for(life.watch(running.job_id), 5)) == [*FIRST, "artifact_ready", "completed"]
        job = await taken_again(life)
        assert (await life.watch(job.job_id))[-1].WhichOneof("event") == "completed"
    assert ticking.worst < LOOP
    second = await restarted(alone, life)
    assert len((await second.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs) == 2
    assert kept(await second.watch(running.job_id)) == [*FIRST, "artifact_ready", "completed"]


LOOP = 0.06
"""Seconds for which the loop may be held up: three times what it takes, since the tests' machines are shared."""


async def test_a_job_whose_commit_was_not_answered_is_withdrawn(alone):
    life = await alone.start()
    life.trouble.fail("jobs.write", afterwards=True)
    life.trouble.fail("jobs.delete")
    check_refused(await refusal(create(life, request_id="once")))
    # it is in the store, and yet there is none
    assert await life.engine.storage.store.jobs.find("", "once") is not None
    assert not (await life.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs
    check_refused(await refusal(create(life, request_id="once")))
    life.trouble.mend()
    await until(lambda: life.engine.storage.journal.failure is None)
    job = await taken_again(life)
    assert [one.job_id for one in (await life.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs] == [job.job_id]
    admitted = [request.id for plan in life.executor.plans for request in plan.admit]
    assert admitted[-1] == job.job_id


async def test_and_so_it_is_by_a_server_that_stops(alone):
    first = await alone.start()
    first.executor.gates[Lane.PREPARE].close()
    first.trouble.fail("jobs.write", afterwards=True)
    first.trouble.fail("jobs.delete")
    check_refused(await refusal(create(first)))
    first.trouble.mend()
    await first.stop()
    second = await alone.start()
    assert not (await second.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs


async def test_a_job_whose_client_left_before_its_commit_failed_is_let_go(alone):
    life = await alone.start()
    life.trouble.hold("jobs.write")
    call = create(life)
    await until(lambda: len(life.engine.jobs) == 1)
    call.cancel()
    life.trouble.fail("jobs.write")
    await asyncio.sleep(0.1)
    life.trouble._held.pop("jobs.write").set()
    await until(lambda: len(life.engine.jobs) == 0)
    life.trouble.mend()
    assert (await life.watch((await taken_again(life)).job_id))[-1].WhichOneof("event") == "completed"


async def test_two_calls_with_one_request_id_are_answered_by_one_commit(alone):
    life = await alone.start()
    life.trouble.hold("jobs.write")
    calls = [create(life, request_id="once"), create(life, request_id="once")]
    await until(lambda: life.trouble.seen.count("jobs.write") == 1)
    done, _ = await asyncio.wait([asyncio.ensure_future(_answer(call)) for call in calls], timeout=0.3)
    assert not done, "told of a job that is not committed"
    life.trouble.mend()
    answers = await asyncio.gather(*map(_answer, calls))
    assert len({answer.job.job_id for answer in answers}) == 1


async def _answer(call):
    return await call


async def test_what_cannot_be_read_is_unavailable(alone):
    life = await alone.start()
    job = await life.finished()
    life.engine.jobs.drop(life.engine.jobs.get(job.job_id))
    life.trouble.fail()
    artifact_id = job.artifacts[0].artifact_id
    for call in (
        life.jobs.GetJob(job_pb2.GetJobRequest(job_id=job.job_id)),
        life.jobs.ListJobs(job_pb2.ListJobsRequest()),
        life.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=job.job_id)),
        life.jobs.WatchJobs(job_pb2.WatchJobsRequest(label_selector={"a": "b"})),
        life.jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=job.job_id)),
        life.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=job.job_id)),
        life.artifacts.DownloadArtifact(artifact_pb2.DownloadArtifactRequest(artifact_id=artifact_id)),
        life.artifacts.ListArtifacts(artifact_pb2.ListArtifactsRequest()),
        life.artifacts.DeleteArtifact(artifact_pb2.DeleteArtifactRequest(artifact_id=artifact_id)),
        create(life, request_id="once"),
    ):
        check_refused(await refusal(call))
    check_refused(await upload_refusal(life, messages(png())))
    life.trouble.mend()
    assert len(await data(life, artifact_id)) == job.artifacts[0].size_bytes


async def test_an_output_that_cannot_be_stored_fails_its_job_as_retryable(alone):
    life = await alone.start()
    life.blob_trouble.fail("put", error=lambda: StoreError("the disk of outputs is full"))
    began = time.monotonic()
    job = await life.finished()
    assert (reason(job), job.retryable) == ("OUTPUT_NOT_STORED", True)
    assert "the disk of outputs is full" in job.error.message
    assert 0.5 < time.monotonic() - began < 5, "after patience, and not much later"
    life.blob_trouble.mend()
    assert (await life.finished()).state == event_pb2.JOB_STATE_SUCCEEDED
    size = (await life.finished()).artifacts[0].size_bytes
    assert life.engine.stats().artifact_bytes == 2 * size


async def test_of_two_outputs_both_are_stored_or_none(alone):
    life = await alone.start()
    await_put = life.blob_trouble.before

    async def second_fails(name):
        await await_put(name)
        if name == "put" and life.blob_trouble.seen.count("put") > 1:
            raise StoreError("the disk of outputs is full")

    life.blob_trouble.before = second_fails
    job = await life.finished(sampling={"num_outputs": 2})
    assert reason(job) == "OUTPUT_NOT_STORED"
    assert await names(life) == []
    assert life.engine.stats().artifact_bytes == 0


async def test_a_cancel_while_its_output_is_stored_leaves_nothing(alone):
    life = await alone.start()
    life.blob_trouble.hold("put")
    job = await life.create()
    await until(lambda: job.job_id in life.engine._outputs)
    answer = await life.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=job.job_id))
    assert answer.job.state == event_pb2.JOB_STATE_CANCELLED
    life.blob_trouble.mend()
    await life.engine._outputs.close()
    assert await names(life) == []
    assert life.engine.stats().artifact_bytes == 0
    assert kept(await life.watch(job.job_id)) == [*FIRST, "cancelled"]


async def test_bytes_that_cannot_be_deleted_are_swept_later(alone):
    life = await alone.start()
    job = await life.finished()
    life.blob_trouble.fail("delete")
    await life.jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=job.job_id))
    asset = await life.artifacts.UploadAsset(iter(messages(png())))
    await life.artifacts.DeleteArtifact(artifact_pb2.DeleteArtifactRequest(artifact_id=asset.asset_id))
    assert (life.engine.stats().artifact_bytes, life.engine.assets.size_bytes) == (0, 0)
    assert len(await names(life)) == 2
    life.blob_trouble.mend()
    assert await life.engine.storage.sweep_orphans(age=-10) == 2
    assert await names(life) == []


async def test_the_sweep_takes_what_no_row_names_and_nothing_else(lasting):
    life = await lasting.start()
    job = await life.finished()
    asset = await life.artifacts.UploadAsset(iter(messages(png())))
    storage = life.engine.storage

    async def nobody():
        yield b"nobody's"

    await storage.blobs.put("art_nobody_0", nobody())
    assert await storage.sweep_orphans() == 0, "its row may be on its way"
    assert await storage.sweep_orphans(age=-10) == 1
    assert sorted(await names(life)) == sorted([job.artifacts[0].artifact_id, asset.asset_id])
    await storage.blobs.put("art_nobody_0", nobody())
    storage.journal.failure = StoreError(FULL)
    assert await storage.sweep_orphans(age=-10) == 0, "rows wait to be written"
    storage.journal.failure = None


async def test_the_budget_for_outputs_evicts_the_oldest(alone):
    life = await alone.start()
    size = (await life.finished()).artifacts[0].size_bytes
    await life.stop()
    life = await alone.start(artifact_budget=size * 3 + size // 2)
    jobs = [await life.finished() for _ in range(4)]
    await until(lambda: life.engine.stats().artifact_bytes <= size * 3.5)
    left = {name.removeprefix("art_")[:26] for name in await names(life)}
    assert left == {job.job_id.removeprefix("job_") for job in jobs[-3:]}
    gone = await refusal(life.jobs.GetJob(job_pb2.GetJobRequest(job_id=jobs[0].job_id)))
    assert gone.metadata["cause"] == "EXPIRED"


async def test_what_is_deleted_twice_at_once_is_counted_once(lasting):
    life = await lasting.start()
    job = await life.finished()
    asset = await life.artifacts.UploadAsset(iter(messages(png())))
    other = await life.finished()
    both = [life.jobs.DeleteJob(job_pb2.DeleteJobRequest(job_id=job.job_id)) for _ in range(2)]
    gone = artifact_pb2.DeleteArtifactRequest(artifact_id=asset.asset_id)
    both += [life.artifacts.DeleteArtifact(gone) for _ in range(2)]
    await asyncio.gather(*map(_answer, both), return_exceptions=True)
    assert life.engine.stats().artifact_bytes == other.artifacts[0].size_bytes
    assert life.engine.assets.size_bytes == 0


async def test_a_slow_store_holds_up_neither_the_loop_nor_other_jobs(alone):
    life = await alone.start()
    await life.finished()
    life.trouble.delay = 0.2
    async with Ticking() as ticking:
        began = time.monotonic()
        jobs = await asyncio.gather(*(life.finished(sampling={"seed": seed}) for seed in range(12)))
    assert {job.state for job in jobs} == {event_pb2.JOB_STATE_SUCCEEDED}
    assert time.monotonic() - began < 4, "commits are shared"
    assert ticking.worst < LOOP
    life.trouble.delay = 0.0


async def test_a_database_that_goes_away_is_used_again(postgres, template, tmp_path):
    async with place("postgresql", tmp_path, await postgres.create(template)) as here:
        life = await here.start()
        life.executor.gates[Lane.STEP].close()
        running = await life.create()
        await stepping(life, running.job_id)
        async with Ticking() as ticking:
            await asyncio.to_thread(postgres.stop, "immediate")
            try:
                check_refused(await refusal(create(life)))
                life.executor.gates[Lane.STEP].open()
                await until(lambda: life.engine.jobs.get(running.job_id).ended)
                check_refused(await refusal(life.jobs.ListJobs(job_pb2.ListJobsRequest())))
                check_refused(await refusal(life.jobs.GetJob(job_pb2.GetJobRequest(job_id="job_unknown"))))
                assert (await life.get(running.job_id)).state == event_pb2.JOB_STATE_RUNNING
                await asyncio.sleep(1)
            finally:
                await asyncio.to_thread(postgres.start)
            assert kept(await asyncio.wait_for(life.watch(running.job_id), 20)) == [
                *FIRST, "artifact_ready", "completed",
            ]  # fmt: skip
            job = await taken_again(life)
            assert (await life.watch(job.job_id))[-1].WhichOneof("event") == "completed"
        assert ticking.worst < LOOP


async def test_a_folder_that_may_not_be_written(alone):
    life = await alone.start()
    before = await life.finished()
    files = Path(life.engine.config.store.state_dir) / "files"
    moved = files.rename(files.with_name("moved"))
    files.write_bytes(b"in the way")
    job = await life.finished()
    assert (reason(job), job.retryable) == ("OUTPUT_NOT_STORED", True)
    assert "--artifact-url" in job.error.message
    request = artifact_pb2.DownloadArtifactRequest(artifact_id=before.artifacts[0].artifact_id)
    check_refused(await refusal(life.artifacts.DownloadArtifact(request)))
    files.unlink()
    moved.rename(files)
    assert len(await data(life, before.artifacts[0].artifact_id)) == before.artifacts[0].size_bytes
    assert (await life.finished()).state == event_pb2.JOB_STATE_SUCCEEDED


@pytest.fixture
def small_disk():
    """A folder on a file system of its own, of 4 MiB."""
    folder = Path(tempfile.mkdtemp(prefix="omni-small-"))
    mounted = (
        shutil.which("mount") is not None
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        folder.rmdir()
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()


async def test_a_disk_that_is_really_full(small_disk):
    async with place("sqlite", small_disk) as here:
        life = await here.start()
        before = await life.finished()
        life.executor.gates[Lane.DECODE].close()
        running = await life.create()
        await until(lambda: life.engine.jobs.get(running.job_id).step == 3)
        with (small_disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        life.executor.gates[Lane.DECODE].open()
        error = await refusal(create(life))
        check_refused(error)
        assert "full" in error.message
        assert len(await data(life, before.artifacts[0].artifact_id)) == before.artifacts[0].size_bytes
        (small_disk / "ballast").unlink()
        # its output was stored in the end, or it failed as retryable: nothing hangs
        last = (await asyncio.wait_for(life.watch(running.job_id), 20))[-1]
        assert last.WhichOneof("event") == "completed" or reason(last) == "OUTPUT_NOT_STORED"
        job = await taken_again(life)
        assert (await life.watch(job.job_id))[-1].WhichOneof("event") == "completed"
        second = await restarted(here, life)
        listed = (await second.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs
        assert {one.job_id for one in listed} == {before.job_id, running.job_id, job.job_id}
