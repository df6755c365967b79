import hashlib

import pytest

from omni_grpc.client.channel import Reconnect
from omni_grpc.client.download import Download
from omni_grpc.client.failure import CallFailure
from omni_grpc.client.parts import Parts
from omni_grpc.types.errors import Code, Failure, InternalError, NotFound, Unavailable
from omni_grpc.v1.artifact_pb2 import DownloadArtifactResponse
from omni_grpc.v1.media_pb2 import Artifact, ArtifactChunk

DATA = bytes(range(100))


def artifact(data=DATA, **changes):
    fields = {"artifact_id": "art_1", "size_bytes": len(data), "sha256": hashlib.sha256(data).digest()}
    return Artifact(**(fields | changes))


def chunk(start, stop, data=DATA):
    return ArtifactChunk(artifact_id="art_1", offset=start, data=data[start:stop])


def test_chunks_become_the_bytes():
    parts = Parts(artifact())
    parts.add(chunk(0, 60))
    assert (parts.offset, parts.complete) == (60, False)
    parts.add(chunk(60, 100))
    assert parts.complete
    assert parts.data() == DATA


@pytest.mark.parametrize("wrong", [chunk(60, 100), chunk(40, 60)], ids=["gap", "overlap"])
def test_a_chunk_at_the_wrong_place_is_refused(wrong):
    parts = Parts(artifact())
    parts.add(chunk(0, 50))
    with pytest.raises(InternalError, match="expected 50") as caught:
        parts.add(wrong)
    assert caught.value.reason == "ARTIFACT_CORRUPT"
    assert caught.value.failure.metadata == {"artifact_id": "art_1"}


def test_a_changed_byte_is_found():
    parts = Parts(artifact())
    parts.add(chunk(0, 100, DATA[:70] + b"!" + DATA[71:]))
    with pytest.raises(InternalError, match="SHA-256"):
        parts.data()


def test_missing_and_surplus_bytes_are_found():
    parts = Parts(artifact())
    parts.add(chunk(0, 99))
    with pytest.raises(InternalError, match="99 of 100 bytes"):
        parts.data()
    parts = Parts(artifact(size_bytes=10))
    with pytest.raises(InternalError, match="announced were 10"):
        parts.add(chunk(0, 11))


def test_a_download_that_goes_on_with_another_artifact_is_refused():
    parts = Parts(artifact())
    parts.resumed(artifact())
    with pytest.raises(InternalError, match="another artifact"):
        parts.resumed(artifact(sha256=b"x"))


def lost(code=Code.UNAVAILABLE):
    return CallFailure(Failure(code=code, reason=code.value, message="gone"), from_server=False)


def test_a_download_asks_for_what_is_missing():
    download = Download(Reconnect(attempts=2, first_delay=0.0), "art_1")
    assert download.request().offset == 0
    download.accept(DownloadArtifactResponse(metadata=artifact()))
    download.accept(DownloadArtifactResponse(chunk=chunk(0, 60)))
    assert download.lost(lost()) == 0.0
    assert download.request().offset == 60
    download.accept(DownloadArtifactResponse(metadata=artifact()))
    download.accept(DownloadArtifactResponse(chunk=chunk(60, 100)))
    assert download.finished().data() == DATA


def test_a_download_goes_on_from_bytes_that_came_another_way():
    parts = Parts(artifact())
    parts.add(chunk(0, 30))
    assert Download(Reconnect(), "art_1", parts).request().offset == 30


def test_a_download_that_is_lost_too_often_is_given_up():
    download = Download(Reconnect(attempts=2, first_delay=0.0), "art_1")
    with pytest.raises(NotFound):
        download.lost(lost(Code.NOT_FOUND))
    # before the first message once: nobody may be there
    download.lost(lost())
    with pytest.raises(Unavailable):
        download.lost(lost())
    download.accept(DownloadArtifactResponse(metadata=artifact()))
    for _ in range(2):
        download.lost(lost())
    with pytest.raises(Unavailable, match="artifact art_1, at byte 0: gone"):
        download.lost(lost())


def test_a_download_without_metadata_breaks_the_protocol():
    with pytest.raises(InternalError) as caught:
        Download(Reconnect(), "art_1").accept(DownloadArtifactResponse(chunk=chunk(0, 1)))
    assert caught.value.reason == "PROTOCOL_ERROR"
