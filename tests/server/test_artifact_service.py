from collections.abc import Mapping

import pytest

from omni_grpc.types.media import ImageFormat
from omni_grpc.v1 import artifact_pb2

from .fake_executor import picture
from .service import refusal

BIG: Mapping[str, object] = {"width": 1024, "height": 512, "output_format": "IMAGE_FORMAT_RAW_RGB8"}
SIZE = 1024 * 512 * 3


def download(service, artifact_id, **window):
    return service.artifacts.DownloadArtifact(artifact_pb2.DownloadArtifactRequest(artifact_id=artifact_id, **window))


async def fetch(service, artifact_id, **window):
    first, *rest = [message async for message in download(service, artifact_id, **window)]
    return first.metadata, [message.chunk for message in rest]


async def test_a_download_is_the_metadata_and_then_the_bytes(service):
    job = await service.finished(**BIG)
    metadata, chunks = await fetch(service, job.artifacts[0].artifact_id)
    assert metadata == job.artifacts[0]
    assert b"".join(chunk.data for chunk in chunks) == picture(1024, 512, 7, ImageFormat.RAW_RGB8)
    assert [chunk.last for chunk in chunks] == [False, False, True]


@pytest.mark.parametrize(
    ("window", "start", "end", "last"),
    [
        ({"offset": 1_000_000}, 1_000_000, SIZE, True),
        ({"offset": 10, "max_bytes": 700_000}, 10, 700_010, False),
        ({"offset": 10, "max_bytes": SIZE}, 10, SIZE, True),
        ({"max_bytes": 0}, 0, 0, None),
        ({"offset": SIZE}, SIZE, SIZE, None),
    ],
)
async def test_a_download_can_go_on_from_any_byte(service, window, start, end, last):
    job = await service.finished(**BIG)
    _, chunks = await fetch(service, job.artifacts[0].artifact_id, **window)
    assert b"".join(chunk.data for chunk in chunks) == picture(1024, 512, 7, ImageFormat.RAW_RGB8)[start:end]
    assert [chunk.offset for chunk in chunks[:1]] == ([] if last is None else [start])
    assert [chunk.last for chunk in chunks[-1:]] == ([] if last is None else [last])


async def test_an_offset_beyond_the_end_is_out_of_range(service):
    job = await service.finished()
    artifact = job.artifacts[0]
    error = await refusal(download(service, artifact.artifact_id, offset=artifact.size_bytes + 1))
    assert (error.code, error.reason) == ("OUT_OF_RANGE", "OFFSET_OUT_OF_RANGE")
    assert error.metadata == {"size_bytes": str(artifact.size_bytes)}


async def test_artifacts_are_listed_newest_first_page_by_page(service):
    jobs = [await service.finished(sampling={"num_outputs": 2}) for _ in range(2)]
    newest = [artifact for job in reversed(jobs) for artifact in reversed(job.artifacts)]
    seen, token = [], None
    while token != "":
        query = artifact_pb2.ListArtifactsRequest(page_size=3, page_token=token or "")
        response = await service.artifacts.ListArtifacts(query)
        assert len(response.artifacts) <= 3
        seen += response.artifacts
        token = response.next_page_token
    assert seen == newest
    of_one = artifact_pb2.ListArtifactsRequest(job_id=jobs[0].job_id)
    assert list((await service.artifacts.ListArtifacts(of_one)).artifacts) == newest[2:]
    unknown = service.artifacts.ListArtifacts(artifact_pb2.ListArtifactsRequest(job_id="nothing"))
    assert (await refusal(unknown)).reason == "JOB_NOT_FOUND"


async def test_a_deleted_artifact_is_gone_and_its_job_keeps_the_record(service):
    job = await service.finished(sampling={"num_outputs": 2})
    gone, kept = job.artifacts
    request = artifact_pb2.DeleteArtifactRequest(artifact_id=gone.artifact_id)
    await service.artifacts.DeleteArtifact(request)
    assert (await refusal(download(service, gone.artifact_id))).reason == "ARTIFACT_NOT_FOUND"
    assert (await refusal(service.artifacts.DeleteArtifact(request))).reason == "ARTIFACT_NOT_FOUND"
    assert list((await service.get(job.job_id)).artifacts) == [gone, kept]
    listed = await service.artifacts.ListArtifacts(artifact_pb2.ListArtifactsRequest())
    assert list(listed.artifacts) == [kept]
