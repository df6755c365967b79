"""StartProfile and StopProfile: what may be asked, what ends a recording, and where its files are."""

import asyncio
import hashlib
import json
from pathlib import Path

import pytest

from omni_grpc.engine.scheduler import Lane
from omni_grpc.v1 import admin_pb2, artifact_pb2

from .service import Service, image, refusal, serving, until
from .test_audit import audited

STEPS, STOPPED, LIMIT, JOB, ASLEEP = (
    getattr(admin_pb2, f"PROFILE_END_{name}") for name in ("STEPS", "STOPPED", "TIME_LIMIT", "JOB_ENDED", "ASLEEP")
)


async def start(service: Service, **fields) -> admin_pb2.StartProfileResponse:
    return await service.admin.StartProfile(admin_pb2.StartProfileRequest(**fields))


async def stop(service: Service, begun, **fields) -> admin_pb2.StopProfileResponse:
    return await service.admin.StopProfile(admin_pb2.StopProfileRequest(profile_id=begun.profile_id, **fields))


async def download(service: Service, name: str):
    call = service.artifacts.DownloadArtifact(artifact_pb2.DownloadArtifactRequest(artifact_id=name))
    first, *rest = [message async for message in call]
    return first.metadata, b"".join(message.chunk.data for message in rest)


async def test_a_profile_of_the_next_steps_ends_by_itself_and_is_downloaded(service):
    begun = await start(service, num_steps=2)
    assert (begun.model, list(begun.activities), begun.time_limit.seconds) == ("toy", ["cpu"], 60)
    job = await service.finished(sampling={"steps": 4})
    found = await stop(service, begun, wait=True)
    assert (found.steps, found.end, len(found.files)) == (2, STEPS, 1)
    assert list(found.artifact_ids) == [found.files[0].artifact_id]
    metadata, data = await download(service, found.artifact_ids[0])
    assert (data, metadata.mime_type) == (b"2 steps", "application/gzip")
    assert metadata.sha256 == hashlib.sha256(data).digest() or metadata.sha256 == hashlib.sha256(data).hexdigest()
    assert metadata.expire_time.seconds > metadata.create_time.seconds
    assert job.step == 4, "the steps of jobs go on"
    assert await stop(service, begun) == found, "asked again, it tells the same"
    await service.artifacts.DeleteArtifact(artifact_pb2.DeleteArtifactRequest(artifact_id=found.artifact_ids[0]))
    gone = await refusal(
        service.artifacts.DownloadArtifact(artifact_pb2.DownloadArtifactRequest(artifact_id=found.artifact_ids[0]))
    )
    assert gone.code == "NOT_FOUND"


async def test_a_second_profile_of_a_model_is_refused_until_the_first_has_ended(service):
    begun = await start(service)
    error = await refusal(start(service))
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "PROFILE_RUNNING")
    assert error.metadata["profile_id"] == begun.profile_id
    found = await stop(service, begun)
    assert (found.steps, found.end, len(found.files)) == (0, STOPPED, 0)
    await start(service)


async def test_a_profile_ends_after_its_time(service):
    begun = await start(service, time_limit={"nanos": 50_000_000})
    assert (await stop(service, begun, wait=True)).end == LIMIT


async def test_a_profile_of_a_job_has_its_steps_alone_and_ends_with_it(service):
    service.executor.gates[Lane.STEP].close()
    job = await service.create(sampling={"steps": 3})
    begun = await start(service, job_id=job.job_id)
    service.executor.gates[Lane.STEP].open()
    found = await stop(service, begun, wait=True)
    assert (found.steps, found.end) == (3, JOB)
    error = await refusal(start(service, job_id=job.job_id))
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "JOB_ENDED")
    assert (await refusal(start(service, job_id="job_0"))).reason == "JOB_NOT_FOUND"


async def test_a_worker_that_dies_takes_its_profile_along_and_leaves_room_for_the_next(service):
    begun = await start(service)
    waiting = asyncio.ensure_future(refusal(stop(service, begun, wait=True)))
    await until(lambda: service.executor.recording is not None)
    await service.executor.die()
    error = await waiting
    assert (error.code, error.reason) == ("UNAVAILABLE", "PROFILE_LOST")
    assert "SIGKILL" in error.message
    await until(lambda: service.executor.starts == 2 and service.engine.replicas[0].open)
    again = await start(service, num_steps=1)
    await service.finished()
    assert (await stop(service, again, wait=True)).steps == 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 1001}, "num_steps"),
        ({"activities": ["cpu", "cuda"]}, "activities[1]"),
        ({"activities": ["gpu"]}, "activities[0]"),
        ({"memory": True}, "memory"),
        ({"time_limit": {"seconds": 601}}, "time_limit"),
        ({"time_limit": {}}, "time_limit"),
    ],
)
async def test_what_cannot_be_recorded_is_refused_by_field(service, fields, field):
    error = await refusal(start(service, **fields))
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field])
    assert not service.executor.orders


async def test_of_several_ranks_a_profile_waits_for_all_of_them():
    async with serving(tensor_parallel_size=2, device="cpu") as service:
        service.executor.ranks = 2
        begun = await start(service, num_steps=1, all_ranks=True)
        waiting = asyncio.ensure_future(stop(service, begun, wait=True))
        await service.finished()
        assert [file.rank for file in (await waiting).files] == [0]
        assert service.engine.profiling.current is None
        await start(service, num_steps=1)
        await service.finished()
        await until(lambda: service.engine.profiling.current is None)


async def test_a_replica_that_is_not_there_is_refused(service):
    assert (await refusal(start(service, replica=1))).reason == "REPLICA_NOT_FOUND"
    async with serving() as other:
        other.executor.loading.close()
        await other.executor.die()
        assert (await refusal(start(other))).reason == "REPLICA_NOT_READY"
        other.executor.loading.open()


async def test_a_profile_is_for_admins_and_is_in_the_audit_log(tmp_path: Path):
    from .test_access import call

    async with audited(tmp_path) as service:
        begun = await call(service, "AdminService/StartProfile", admin_pb2.StartProfileRequest(num_steps=1), "admin")
        await call(service, "GenerationService/GenerateImage", image(), "owner")
        request = admin_pb2.StopProfileRequest(profile_id=begun.profile_id, wait=True)
        found = await call(service, "AdminService/StopProfile", request, "admin")
        file = artifact_pb2.DownloadArtifactRequest(artifact_id=found.artifact_ids[0])
        await call(service, "ArtifactService/DownloadArtifact", file, "admin")
        with pytest.raises(Exception, match="scope"):
            await call(service, "ArtifactService/DownloadArtifact", file, "owner")
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    started, stopped = (
        next(line for line in lines if line["action"] == f"{name}Profile") for name in ("Start", "Stop")
    )
    assert (started["subject"], started["outcome"], started["model"]) == ("admin", "OK", "toy")
    assert started["profile_id"] == stopped["profile_id"] == begun.profile_id
    downloads = [line for line in lines if line["action"] == "DownloadArtifact" and line.get("artifact_id")]
    assert {line["outcome"] for line in downloads} == {"OK", "PERMISSION_DENIED"}
