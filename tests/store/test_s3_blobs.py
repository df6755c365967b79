"""A bucket of blobs: a store that is slow, away or refuses, signed addresses, and processes that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from email.message import Message

import pytest

from omni_grpc.store.blobs.open import artifacts_at
from omni_grpc.store.blobs.s3 import S3Blobs
from omni_grpc.store.blobs.s3_signing import with_answers
from omni_grpc.store.blobs.s3_url import Bucket, bucket_of
from omni_grpc.store.seam import StoreError
from omni_grpc.types.errors import ConfigError
from tests.store.blob_conformance import MIB, STALL_SECONDS, missing, names, noise, pieces, read, stall_of
from tests.store.conftest import KEYS, PAGE, S3Server
from tests.store.processes import killed_while_putting, memory_of_a_large_one, whole

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def answering(answer: Answer, timeout: float = 1.0) -> AsyncIterator[S3Blobs]:
    """A bucket of a server that answers every connection so."""
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        bucket = Bucket("outputs", "p", f"http://127.0.0.1:{port}", "us-east-1", allow_http=True)
        yield S3Blobs(bucket, timeout=timeout)


def fixed(status: str, body: str = "", length: int | None = None, then: float = 0.0) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            head = f'HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\nETag: "e"\r\n'
            head += "Last-Modified: Sun, 29 Nov 2026 17:00:00 GMT\r\nConnection: close\r\n\r\n"
            writer.write((head + body).encode())
            await writer.drain()
            await asyncio.sleep(then)
        writer.close()

    return answer


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 16):
        pass
    writer.close()


async def listed(blobs: S3Blobs) -> None:
    await names(blobs)


CALLS: dict[str, Callable[[S3Blobs], Awaitable[object]]] = {
    "put": lambda blobs: blobs.put("a", pieces(b"x")),
    "put-large": lambda blobs: blobs.put("a", pieces(bytes(40 * MIB))),
    "read": lambda blobs: read(blobs, "a"),
    "read-nothing": lambda blobs: read(blobs, "a", 3, 3),
    "delete": lambda blobs: blobs.delete(["a"]),
    "names": listed,
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_store_that_does_not_answer_is_away(s3: S3Server, call: str) -> None:
    started = time.monotonic()
    async with answering(silence, timeout=0.4) as blobs:
        with pytest.raises(StoreError, match=r"does not answer within 0\.4 s; see to its address") as caught:
            await CALLS[call](blobs)
    assert caught.value.retryable
    assert time.monotonic() - started < 1.5


async def test_a_store_that_stops_in_the_middle_is_away(s3: S3Server) -> None:
    async with answering(fixed("200 OK", "x" * 2 * MIB, 4 * MIB, then=3), timeout=0.4) as blobs:
        reader = blobs.read("a")
        assert len(await anext(reader)) == MIB
        started = time.monotonic()
        with pytest.raises(StoreError, match="cannot read from the object store of outputs: it does not answer within"):
            await read_on(reader)
        assert time.monotonic() - started < 1.5


async def read_on(reader: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in reader])


async def test_a_store_that_is_not_there_is_away(s3: S3Server) -> None:
    blobs = S3Blobs(Bucket("outputs", "", "http://127.0.0.1:9", "us-east-1", allow_http=True), timeout=1)
    with pytest.raises(StoreError, match="cannot be reached; see to its address") as caught:
        await blobs.put("a", pieces(b"x"))
    assert caught.value.retryable


def refusal(code: str) -> str:
    return f"<Error><Code>{code}</Code><AWSAccessKeyId>{KEYS['AWS_ACCESS_KEY_ID']}</AWSAccessKeyId></Error>"


REFUSALS = (
    ("403 Forbidden", "AccessDenied", r"may not do this \(AccessDenied\); permit s3:PutObject", False),
    ("403 Forbidden", "InvalidAccessKeyId", r"refuses the credentials \(InvalidAccessKeyId\)", False),
    ("401 Unauthorized", "Other", r"refuses the credentials \(Other\)", False),
    ("404 Not Found", "NoSuchBucket", "there is no such bucket; create it", False),
    ("400 Bad Request", "EntityTooLarge", r"it failed \(EntityTooLarge\)", False),
    ("503 Service Unavailable", "SlowDown", r"it failed \((SlowDown|HTTP 503)\); try again later", True),
    ("500 Internal Server Error", "", r"it failed \(HTTP 500\); try again later", True),
)


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        *(("put", refused) for refused in REFUSALS),
        *(("read", refused) for refused in REFUSALS),
        *((call, REFUSALS[0]) for call in ("put-large", "delete", "names")),
        ("names", REFUSALS[2]),
        ("names", REFUSALS[3]),
    ],
)
async def test_what_the_store_says_is_said_in_words(
    s3: S3Server, call: str, refused: tuple[str, str, str, bool]
) -> None:
    status, code, text, retryable = refused
    async with answering(fixed(status, refusal(code) if code else "?"), timeout=0.4) as blobs:
        with pytest.raises(StoreError, match=text) as caught:
            await CALLS[call](blobs)
    assert caught.value.retryable is retryable
    logged = "".join(traceback.format_exception(caught.value))
    for secret in (*KEYS.values(), "127.0.0.1", "AWS4-HMAC"):
        assert secret not in str(caught.value)
        assert secret not in logged


async def test_a_bucket_that_there_is_not_is_refused_at_the_start(s3: S3Server) -> None:
    with pytest.raises(
        ConfigError, match=r"^artifact_url: cannot keep outputs in s3://nowhere/pre/fix: .* there is no such bucket"
    ):
        await artifacts_at(s3.url("nowhere")).open()


async def test_nothing_of_the_check_is_left(s3: S3Server) -> None:
    bucket = s3.bucket()
    blobs = artifacts_at(s3.url(bucket))
    await blobs.open()
    assert s3.client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


async def test_objects_lie_below_the_prefix_and_others_are_left_alone(s3: S3Server) -> None:
    bucket = s3.bucket()
    blobs, beside = artifacts_at(s3.url(bucket, "a")), artifacts_at(s3.url(bucket, "ab"))
    await blobs.put("x/1", pieces(b"x"))
    await beside.put("y", pieces(b"y"))
    s3.client.put_object(Bucket=bucket, Key="a/not a blob", Body=b"z")
    assert await names(blobs) == ["x/1"]
    assert await missing(blobs, "y")
    assert {one["Key"] for one in s3.client.list_objects_v2(Bucket=bucket)["Contents"]} == {
        *("a/x/1", "ab/y", "a/not a blob")
    }


async def test_more_than_one_request_deletes_is_deleted(s3: S3Server) -> None:
    blobs = artifacts_at(s3.url(s3.bucket()))
    every = [f"n{number:04}" for number in range(2100)]
    for name in (every[0], every[1500], every[-1]):
        await blobs.put(name, pieces(b"x"))
    await blobs.delete(every)
    assert await names(blobs) == []


async def test_more_than_a_page_is_listed(s3: S3Server) -> None:
    blobs = artifacts_at(s3.url(s3.bucket()))
    every = [f"n{number:04}" for number in range(2 * PAGE + 1)]
    await asyncio.gather(*(blobs.put(name, pieces(b"x")) for name in every))
    assert await names(blobs) == every


async def test_a_reader_may_take_its_time(s3: S3Server) -> None:
    bucket = s3.bucket()
    blobs = S3Blobs(bucket_of(s3.url(bucket)), timeout=1.5)
    data = noise(24 * MIB)
    await blobs.put("a", pieces(data))
    reader = blobs.read("a")
    found = await anext(reader)
    await asyncio.sleep(1.7)  # more than the store has for an answer
    assert found + await read_on(reader) == data


async def test_a_reader_goes_on_to_the_end_of_what_it_began(s3: S3Server) -> None:
    blobs = artifacts_at(s3.url(s3.bucket()))
    data = noise(12 * MIB)
    await blobs.put("a", pieces(data))
    reader = blobs.read("a", 5)
    found = await anext(reader)
    await blobs.delete(["a"])
    assert await missing(blobs, "a")
    assert found + await read_on(reader) == data[5:]


async def test_the_loop_is_not_stalled(s3: S3Server) -> None:
    blobs = artifacts_at(s3.url(s3.bucket()))
    data = noise(24 * MIB)

    async def work() -> None:
        await blobs.put("a", pieces(data, MIB))
        async for _ in blobs.read("a"):
            pass
        await blobs.put("b", pieces(data[: 7 * MIB], MIB))

    # nothing here waits in a call: what counts is what this thread computes, whatever time the server takes from it
    assert await stall_of(work, time.thread_time) < STALL_SECONDS


def fetched(url: str) -> tuple[bytes, Message]:
    with urllib.request.urlopen(url) as answer:
        return answer.read(), answer.headers


async def test_a_signed_address_is_fetched_by_anybody(s3: S3Server) -> None:
    """That of moto looks neither at the signature nor at its time: the next test compares it with botocore's."""
    blobs = artifacts_at(s3.url(s3.bucket()))
    await blobs.put("a/b", pieces(b"hello"))
    url = await blobs.signed_url("a/b", 60, mime_type="image/webp", filename='my "cat" \u00e9.webp')
    assert url is not None
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in urllib.parse.unquote(url)
    data, headers = await asyncio.to_thread(fetched, url)
    assert data == b"hello"
    assert headers["Content-Type"] == "image/webp"
    assert headers["Content-Disposition"] == (
        "attachment; filename=\"my _cat_ _.webp\"; filename*=UTF-8''my%20%22cat%22%20%C3%A9.webp"
    )
    with pytest.raises(urllib.error.HTTPError, match="403"):
        await asyncio.to_thread(fetched, url.partition("?")[0])


@pytest.mark.parametrize("token", ["", "a/session+token=="])
@pytest.mark.parametrize("named", [False, True])
async def test_a_signature_is_the_one_of_botocore(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, token: str, named: bool
) -> None:
    import boto3
    from botocore.client import Config

    if token:
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    config = Config(signature_version="s3v4", s3={"addressing_style": "path"})
    keys = {"aws_session_token": token or None} | {name.lower(): value for name, value in KEYS.items()}
    client = boto3.client("s3", endpoint_url=s3.endpoint, region_name="us-east-1", config=config, **keys)
    blobs = artifacts_at(s3.url("outputs-1"))
    given = {"mime_type": "image/webp", "filename": "cat.webp"} if named else {}
    params = {"Bucket": "outputs-1", "Key": "pre/fix/a/b-1_2.webp"}
    if named:
        disposition = "attachment; filename=\"cat.webp\"; filename*=UTF-8''cat.webp"
        params |= {"ResponseContentType": "image/webp", "ResponseContentDisposition": disposition}
    for _ in range(3):  # unless a second has passed between the two
        ours = await blobs.signed_url("a/b-1_2.webp", 90, **given)
        theirs = client.generate_presigned_url("get_object", Params=params, ExpiresIn=90)
        ours, theirs = (urllib.parse.urlsplit(str(url)) for url in (ours, theirs))
        if query(ours.query)["X-Amz-Date"] == query(theirs.query)["X-Amz-Date"]:
            break
    assert query(ours.query) == query(theirs.query)
    assert ours[:3] == theirs[:3]


def query(text: str) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(text, strict_parsing=True))


async def test_an_address_signed_with_other_keys_stays_as_it_is(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = await artifacts_at(s3.url("outputs-1")).signed_url("a", 60)
    assert url is not None
    for secret in ("another", ""):
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        assert with_answers(url, "image/webp", "cat.webp") == url


@pytest.mark.parametrize("seconds", [0, 7 * 24 * 3600 + 1])
async def test_how_long_an_address_is_valid_has_limits(s3: S3Server, seconds: float) -> None:
    with pytest.raises(ValueError, match="valid for 1 to 604800 s"):
        await artifacts_at(s3.url("outputs-1")).signed_url("a", seconds)


async def test_what_killed_processes_left_is_whole(s3: S3Server) -> None:
    bucket = s3.bucket()
    killed_while_putting(s3.url(bucket))
    blobs = artifacts_at(s3.url(bucket))
    await blobs.open()
    await whole(blobs)


def test_a_large_blob_is_never_whole_in_memory(s3: S3Server) -> None:
    assert memory_of_a_large_one(s3.url(s3.bucket())) < 64


def test_an_address_says_where_and_how() -> None:
    assert bucket_of(
        "s3://b-1.x/a/b/?endpoint=https%3A%2F%2Fhost:9000%2F&region=eu-west-1&virtual_hosted=true"
    ) == Bucket("b-1.x", "a/b", "https://host:9000", "eu-west-1", virtual_hosted=True)
    assert bucket_of("s3://bucket") == Bucket("bucket")
    assert bucket_of("s3://bucket?endpoint=http://host&allow_http=true").allow_http
    assert str(bucket_of("s3://bucket/a?region=x")) == "s3://bucket/a"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://", "it names no bucket"),
        ("s3://b", "it names no bucket"),
        ("s3://bucket#hunter2", "it names no bucket"),
        ("s3://key:hunter2@bucket/a", "it holds credentials; give them by AWS_"),  # pragma: allowlist secret
        ("s3://bucket/a/../b", "its prefix may have letters"),
        ("s3://bucket/?access_key_id=hunter2", "'access_key_id' is not an option: those are endpoint, region"),
        ("s3://bucket/?hunter2%20=1", "it has an unknown option: those are endpoint"),
        ("s3://bucket/?region=a&region=b", "an option is given twice"),
        ("s3://bucket/?region=a/hunter2", "its region is"),
        ("s3://bucket/?endpoint=ftp://hunter2", "its endpoint is https://host"),
        ("s3://bucket/?endpoint=https://u:hunter2@host", "its endpoint holds"),  # pragma: allowlist secret
        (
            "s3://bucket/?endpoint=http://hunter2",
            "its endpoint is not encrypted; give an https:// one",
        ),
        ("s3://bucket/?allow_http=hunter2", "allow_http is true or false"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^artifact_url: {text}.*; give s3://bucket/prefix") as caught:
        artifacts_at(url)
    assert "hunter2" not in str(caught.value)


async def test_an_endpoint_of_the_environment_is_not_spoken_to_in_the_clear(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    blobs = S3Blobs(bucket_of(f"s3://{s3.bucket()}?region=us-east-1"), timeout=2)
    with pytest.raises(StoreError):
        await blobs.put("a", pieces(b"x"))
