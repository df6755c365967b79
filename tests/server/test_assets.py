"""UploadAsset: bytes in, checked, within a quota."""

import hashlib

import pytest
from grpc import aio

from omni_grpc.gate import files
from omni_grpc.v1 import artifact_pb2, generation_pb2
from tests.store.test_assets import get

from .service import read_refusal, refusal
from .studio import noise, png, serving_studio

pytestmark = pytest.mark.service
DATA = noise(1, 3000)


@pytest.fixture
async def service():
    async with serving_studio(asset_budget=10_000, max_input_bytes=8_000) as running:
        yield running


def messages(data=DATA, mime_type="image/png", *, chunk=1000, **header):
    values = {"mime_type": mime_type, "size_bytes": len(data), "sha256": hashlib.sha256(data).digest()}
    first = artifact_pb2.UploadAssetRequest(header=artifact_pb2.UploadHeader(**(values | header)))
    parts = (data[offset : offset + chunk] for offset in range(0, len(data), chunk))
    return [first, *(artifact_pb2.UploadAssetRequest(data=part) for part in parts)]


async def upload(service, data, mime_type):
    return await service.artifacts.UploadAsset(iter(messages(data, mime_type)))


async def upload_refusal(service, sent):
    """Where the refusal comes while grpc's client still sends, that client sometimes ends with an error of its own
    ("Internal error from Core") in place of the server's: then the call is made again.
    """
    for _ in range(5):
        with pytest.raises(aio.AioRpcError) as caught:
            await service.artifacts.UploadAsset(iter(sent))
        if caught.value.details() != "Internal error from Core":
            break
    return read_refusal(caught.value)


async def test_an_upload_is_stored_with_its_hash_and_its_end(service):
    stored = await upload(service, DATA, "image/png")
    assert (stored.size_bytes, stored.sha256) == (3000, hashlib.sha256(DATA).digest())
    asset, data = await get(service.engine.assets, stored.asset_id)
    assert (data, asset.mime_type) == (DATA, "image/png")
    assert abs(stored.expire_time.seconds - asset.create_time - 3600) < 5


async def test_the_hash_may_be_left_out(service):
    assert (await service.artifacts.UploadAsset(iter(messages(sha256=b"")))).sha256 == hashlib.sha256(DATA).digest()


@pytest.mark.parametrize(
    ("sent", "field", "text"),
    [
        ([], "header", "must be the first message"),
        (messages()[1:], "header", "must be the first message"),
        ([*messages()[:1], *messages()], "header", "was sent again"),
        ([*messages(), artifact_pb2.UploadAssetRequest()], "header", "was sent again"),
        (messages(mime_type=""), "header.mime_type", "is required"),
        (messages(size_bytes=0), "header.size_bytes", "0 is outside 1..8000"),
        (messages(size_bytes=9000), "header.size_bytes", "nearest valid value: 8000"),
        (messages(size_bytes=3001), "header.size_bytes", "is 3001, but 3000 bytes arrived"),
        (messages(size_bytes=2999), "header.size_bytes", "is 2999, but at least 3000 bytes arrived"),
        (messages(sha256=b"12"), "header.sha256", "send the 32 raw bytes"),
        (messages(sha256=bytes(32)), "header.sha256", "the SHA-256 of the bytes is"),
        (
            [*messages()[:1], artifact_pb2.UploadAssetRequest(data=bytes((1 << 20) + 1))],
            "data",
            "the maximum per message",
        ),
    ],
)
async def test_what_is_wrong_is_refused_and_leaves_nothing(service, sent, field, text):
    error = await upload_refusal(service, sent)
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field])
    assert text in error.message
    assert service.engine.assets.size_bytes == 0
    # the room that it had is free again
    await upload(service, noise(2, 8000), "video/mp4")


async def test_a_full_store_refuses_and_a_deleted_asset_makes_room(service):
    first = await upload(service, noise(1, 6000), "image/png")
    error = await upload_refusal(service, messages(noise(2, 6000)))
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "ASSETS_FULL")
    assert error.details["RetryInfo"].retry_delay.seconds > 0
    await service.artifacts.DeleteArtifact(artifact_pb2.DeleteArtifactRequest(artifact_id=first.asset_id))
    await upload(service, noise(2, 6000), "image/png")


async def expiry(service, stored):
    return (await service.engine.storage.store.files.asset(stored.asset_id)).expire_time


async def test_using_an_asset_puts_off_its_end(service):
    stored = await upload(service, png(), "image/png")
    before = await expiry(service, stored)
    body = {"model": "toy", "prompt": "x", "images": [{"asset_id": stored.asset_id}]}
    async for _ in service.generation.EditImage(generation_pb2.EditImageRequest(**body)):
        pass
    assert await expiry(service, stored) > before


async def test_the_type_of_an_asset_is_held_against_its_bytes(service):
    stored = await upload(service, png(), "image/jpeg")
    body = {"model": "toy", "prompt": "x", "images": [{"asset_id": stored.asset_id}]}
    error = await refusal(service.generation.EditImage(generation_pb2.EditImageRequest(**body)))
    assert (error.reason, error.fields) == ("INPUT_TYPE_MISMATCH", ["images[0]"])


async def test_fields_of_a_newer_client_are_refused(service):
    sent = messages()
    sent[1].MergeFromString(b"\xf8\x07\x01")
    error = await upload_refusal(service, sent)
    assert (error.reason, error.fields) == ("FIELD_NOT_SUPPORTED", ["#127"])


async def test_an_upload_that_falls_silent_is_given_up(service, monkeypatch):
    monkeypatch.setattr(files, "UPLOAD_SILENCE", 0.05)
    call = service.artifacts.UploadAsset()
    await call.write(messages()[0])
    error = await refusal(call)
    assert (error.code, error.reason) == ("DEADLINE_EXCEEDED", "UPLOAD_SILENT")
    await upload(service, noise(2, 8000), "video/mp4")
