import hashlib

import pytest

from omni_grpc.client.channel import Reconnect
from omni_grpc.client.download import DownloadState
from omni_grpc.client.failure import CallFailure
from omni_grpc.client.partial_artifact import PartialArtifact
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
    partial = PartialArtifact(artifact())
    partial.add(chunk(0, 60))
    assert (partial.offset, partial.complete) == (60, False)
    partial.add(chunk(60, 100))
    assert partial.complete
    assert partial.data() == DATA


@pytest.mark.parametrize("wrong", [chunk(60, 100), chunk(40, 60)], ids=["gap", "overlap"])
def test_a_chunk_at_the_wrong_place_is_refused(wrong):
    partial = PartialArtifact(artifact())
    partial.add(chunk(0, 50))
    with pytest.raises(InternalError, match="expected 50") as caught:
        partial.add(wrong)
    assert caught.value.reason == "ARTIFACT_CORRUPT"
    assert caught.value.failure.metadata == {"artifact_id": "art_1"}


def test_a_changed_byte_is_found():
    partial = PartialArtifact(artifact())
    partial.add(chunk(0, 100, DATA[:70] + b"!" + DATA[71:]))
    with pytest.raises(InternalError, match="SHA-256"):
        partial.data()


def test_missing_and_surplus_bytes_are_found():
    partial = PartialArtifact(artifact())
    partial.add(chunk(0, 99))
    with pytest.raises(InternalError, match="99 of 100 bytes"):
        partial.data()
    partial = PartialArtifact(artifact(size_bytes=10))
    with pytest.raises(InternalError, match="but 10 were announced"):
        partial.add(chunk(0, 11))


def test_a_download_that_goes_on_with_another_artifact_is_refused():
    partial = PartialArtifact(artifact())
    partial.check_resumed(artifact())
    with pytest.raises(InternalError, match="different artifact"):
        partial.check_resumed(artifact(sha256=b"x"))


def lost(code=Code.UNAVAILABLE):
    return CallFailure(Failure(code=code, reason=code.value, message="gone"), from_server=False)


def test_a_download_asks_for_what_is_missing():
    download = DownloadState(Reconnect(attempts=2, first_delay=0.0), "art_1")
    assert download.request().offset == 0
    download.accept(DownloadArtifactResponse(metadata=artifact()))
    download.accept(DownloadArtifactResponse(chunk=chunk(0, 60)))
    assert download.lost(lost()) == 0.0
    assert download.request().offset == 60
    download.accept(DownloadArtifactResponse(metadata=artifact()))
    download.accept(DownloadArtifactResponse(chunk=chunk(60, 100)))
    assert download.finished().data() == DATA


def test_a_download_goes_on_from_bytes_that_came_another_way():
    partial = PartialArtifact(artifact())
    partial.add(chunk(0, 30))
    assert DownloadState(Reconnect(), "art_1", partial).request().offset == 30


def test_a_download_that_is_lost_too_often_is_given_up():
    download = DownloadState(Reconnect(attempts=2, first_delay=0.0), "art_1")
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
        DownloadState(Reconnect(), "art_1").accept(DownloadArtifactResponse(chunk=chunk(0, 1)))
    assert caught.value.reason == "PROTOCOL_ERROR"
