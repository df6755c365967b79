"""Uploads and outputs as plain files, by ranges, and by addresses that need no token."""

from __future__ import annotations

import asyncio
import hashlib
import time
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest

from omni_grpc.config import HttpConfig
from omni_grpc.gate.addresses import Addresses
from omni_grpc.types.errors import ConfigError, PermissionDenied
from omni_grpc.types.media import ImageFormat
from omni_grpc.v1 import artifact_pb2, generation_pb2
from tests.server.fake_executor import picture
from tests.server.service import image, kinds, serving, until

from .calling import refused, stream
from .tokens import token_file

BIG = {"width": 1024, "height": 512, "output_format": "IMAGE_FORMAT_RAW_RGB8"}
BYTES = picture(1024, 512, 7, ImageFormat.RAW_RGB8)


@pytest.mark.parametrize(
    ("asked", "status", "start", "end"),
    [
        (None, 200, 0, len(BYTES)),
        ("bytes=0-99", 206, 0, 100),
        ("bytes=1000000-", 206, 1_000_000, len(BYTES)),
        ("bytes=-7", 206, len(BYTES) - 7, len(BYTES)),
        ("bytes=5-99999999", 206, 5, len(BYTES)),
        ("bytes=0-1,5-6", 200, 0, len(BYTES)),
        ("bytes=9-3", 200, 0, len(BYTES)),
        ("items=0-3", 200, 0, len(BYTES)),
        (f"bytes=0-{'9' * 5000}", 200, 0, len(BYTES)),
    ],
)
async def test_an_output_by_ranges(service, http, asked, status, start, end):
    artifact = (await service.finished(**BIG)).artifacts[0]
    headers = {} if asked is None else {"range": asked}
    answer = await http.get(f"/files/{artifact.artifact_id}", headers=headers)
    assert (answer.status_code, answer.content) == (status, BYTES[start:end])
    assert answer.headers["content-type"] == artifact.mime_type
    assert answer.headers["etag"] == f'"{artifact.sha256.hex()}"'
    assert answer.headers.get("content-range") == (None if status == 200 else f"bytes {start}-{end - 1}/{len(BYTES)}")
    head = await http.head(f"/files/{artifact.artifact_id}", headers=headers)
    assert (head.status_code, head.content, head.headers["content-length"]) == (status, b"", str(end - start))


async def test_what_has_not_changed_is_not_sent_again(service, http):
    artifact = (await service.finished()).artifacts[0]
    etag = f'"{artifact.sha256.hex()}"'
    path = f"/files/{artifact.artifact_id}"
    assert (await http.get(path, headers={"if-none-match": etag})).status_code == 304
    part = {"range": "bytes=0-3"}
    assert (await http.get(path, headers=part | {"if-range": etag})).status_code == 206
    assert (await http.get(path, headers=part | {"if-range": '"another"'})).status_code == 200


@pytest.mark.parametrize("asked", ["bytes=99999999-", "bytes=-0"])
async def test_a_range_beyond_the_end_is_416(service, http, asked):
    artifact = (await service.finished()).artifacts[0]
    answer = await http.get(f"/files/{artifact.artifact_id}", headers={"range": asked})
    assert (answer.status_code, refused(answer.json()).reason) == (416, "OFFSET_OUT_OF_RANGE")


async def test_what_is_not_there_is_404(http):
    for path in ("/files/nothing", "/files/nothing/address"):
        answer = await http.get(path)
        assert (answer.status_code, refused(answer.json()).reason) == (404, "ARTIFACT_NOT_FOUND")
    assert (await http.delete("/files/nothing")).status_code == 404


async def test_an_upload_is_an_asset(service, http):
    data = bytes(range(256)) * 9000
    answer = await http.post("/files/assets", content=data, headers={"content-type": "image/png"})
    made = answer.json()
    assert (answer.status_code, made["sizeBytes"]) == (200, str(len(data)))
    await service.artifacts.DeleteArtifact(artifact_pb2.DeleteArtifactRequest(artifact_id=made["assetId"]))


@pytest.mark.parametrize(
    ("headers", "fields"),
    [({"content-type": ""}, ["header.mime_type"]), ({"content-type": "image/png"}, ["header.size_bytes"])],
)
async def test_an_upload_that_says_too_little_is_refused(http, headers, fields):
    async def pieces():
        yield b"x" * 100

    content = pieces() if "image/png" in headers.values() else b"x" * 100
    answer = await http.post("/files/assets", content=content, headers=headers)
    assert (answer.status_code, refused(answer.json()).fields) == (400, fields)


async def test_an_upload_above_the_limit_is_refused_before_it_is_read():
    async with serving(http_port=0, max_input_bytes=1000) as service, _client(service) as http:
        answer = await http.post("/files/assets", content=b"x" * 1001, headers={"content-type": "image/png"})
        assert (answer.status_code, refused(answer.json()).fields) == (400, ["header.size_bytes"])


async def test_an_output_is_deleted(service, http):
    artifact = (await service.finished()).artifacts[0]
    assert (await http.delete(f"/files/{artifact.artifact_id}")).status_code == 204
    assert (await http.get(f"/files/{artifact.artifact_id}")).status_code == 404


async def test_a_stream_carries_signed_addresses_that_need_no_token(service, http):
    asked = image(options={"delivery": "ARTIFACT_DELIVERY_SIGNED_URL"})
    events = [message.event async for message in service.generation.GenerateImage(asked)]
    artifact = events[-1].completed.artifacts[0]
    assert artifact.download_uri.startswith(service.http + "/files/")
    answer = await http.get(artifact.download_uri)
    assert hashlib.sha256(answer.content).digest() == artifact.sha256
    assert "artifact_chunk" not in kinds(events)


async def test_an_address_is_for_who_may_read_and_then_for_anybody(tmp_path):
    file, tokens = token_file(tmp_path, studio=["generate", "read"], other=["generate", "read"])
    async with serving(http_port=0, token_file=file) as service, _client(service) as http:
        mine = {"authorization": f"Bearer {tokens['studio']}"}
        made = stream(
            http,
            "GenerationService/GenerateImage",
            image(),
            generation_pb2.GenerateImageResponse,
            "connect+proto",
            **mine,
        )
        artifact = [message.event async for message in made][-1].completed.artifacts[0]
        path = f"/files/{artifact.artifact_id}"
        assert (await http.get(path)).status_code == 401
        assert (await http.get(path + "/address")).status_code == 401
        strangers = {"authorization": f"Bearer {tokens['other']}"}
        assert (await http.get(path, headers=strangers)).status_code == 404
        assert (await http.get(path + "/address", headers=strangers)).status_code == 404
        assert (await http.get(path, headers=mine)).status_code == 200
        url = (await http.get(path + "/address", headers=mine)).json()["url"]
        assert (await http.get(url, headers={"range": "bytes=0-3"})).status_code == 206
        # it opens this output and nothing else
        assert (await http.delete(url)).status_code == 401
        other = url.replace(artifact.artifact_id, "art_another")
        assert refused((await http.get(other)).json()).reason == "ADDRESS_INVALID"
        later = url.replace("expires=", "expires=9")
        assert refused((await http.get(later)).json()).reason == "ADDRESS_INVALID"


async def test_an_address_expires(monkeypatch):
    async with serving(http_port=0, signed_url_seconds=60) as service, _client(service) as http:
        artifact = (await service.finished()).artifacts[0]
        url = (await http.get(f"/files/{artifact.artifact_id}/address")).json()["url"]
        assert (await http.get(url)).status_code == 200
        now = time.time
        monkeypatch.setattr("omni_grpc.gate.addresses.time.time", lambda: now() + 61)
        answer = await http.get(url)
        assert (answer.status_code, refused(answer.json()).reason) == (403, "ADDRESS_EXPIRED")


def test_servers_with_one_key_take_each_others_addresses(tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    shared = HttpConfig(http_port=1, http_key_file=str(key))
    first, second = Addresses(shared, 60), Addresses(shared, 60)
    query = parse_qs(urlsplit(first.url("a")).query)
    second.check("a", query["expires"][0], query["signature"][0])
    with pytest.raises(PermissionDenied):
        Addresses(HttpConfig(http_port=1), 60).check("a", query["expires"][0], query["signature"][0])
    key.write_bytes(b"short")
    for path in (key, tmp_path / "none"):
        with pytest.raises(ConfigError) as caught:
            Addresses(HttpConfig(http_port=1, http_key_file=str(path)), 60)
        assert caught.value.violations[0].field == "http_key_file"


def _client(service):
    return httpx2.AsyncClient(base_url=service.http, timeout=30, trust_env=False)


@pytest.mark.parametrize("path", ["/files/assets", "/v1/images/generations"])
async def test_a_client_that_leaves_amid_its_request_is_no_fault_of_the_server(service, path, caplog):
    caplog.set_level("DEBUG")
    address = urlsplit(service.http)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST {path} HTTP/1.1", f"host: {address.netloc}", "content-type: application/json", "content-length: 1000"
    writer.write("\r\n".join((*head, "", "{")).encode())
    await writer.drain()
    await until(lambda: service.server._calls._open == 1)
    writer.close()
    await until(lambda: any(f"{path} gone" in record.getMessage() for record in caplog.records))
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
