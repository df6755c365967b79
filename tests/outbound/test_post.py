"""Calls of webhooks on real servers: what is sent, what counts as an answer, and where nothing is sent."""

import asyncio
import datetime
import email.utils
import math
import socket
import time

import pytest

from omni_grpc.outbound import Answered, Poster
from omni_grpc.types.errors import FailedPrecondition, InvalidArgument, Unavailable

from .web import answer, endless, moved, silence, web

FIELD = "options.webhook.url"
BODY = b'{"jobId": "job_1"}'
LOOPBACK = ("127.0.0.1",)


@pytest.fixture
async def site(tmp_path):
    async with web(tmp_path) as running:
        yield running


async def post(site, path="/", *, names=LOOPBACK, config=None, url=None, body=BODY, headers=None):
    async def resolve(host, port):
        if isinstance(names, Exception):
            raise names
        return names

    poster = Poster(config or site.hooks(), site.config(), resolve=resolve)
    try:
        return await poster.post(url or site.url(path), body, headers or {}, field=FIELD)
    finally:
        poster.close()


async def refusal(kind, reason, posting):
    with pytest.raises(kind) as caught:
        await posting
    error = caught.value
    assert type(error) is kind
    assert error.reason == f"OUTBOUND_{reason}"
    assert [violation.field for violation in error.violations] == [FIELD]
    assert "secret" not in str(error)
    return error


async def test_the_body_and_the_headers_arrive(site):
    site.paths["/hook"] = answer(b"thanks", status="202 Accepted")
    headers = {"Content-Type": "application/json", "webhook-id": "a"}
    assert await post(site, "/hook?a=b", headers=headers) == Answered(202)
    (head,) = site.asked
    lines = head.split("\r\n")
    assert lines[0] == "POST /hook?a=b HTTP/1.1"
    sent = {line.lower() for line in lines[1:]}
    assert {f"host: media.test:{site.port}", "content-type: application/json", "webhook-id: a"} <= sent
    assert f"content-length: {len(BODY)}" in sent
    assert site.bodies == [BODY]


@pytest.mark.parametrize(
    ("status", "delivered"),
    [
        *(("200 OK", True), ("204 No Content", True), ("299 X", True), ("304 Not Modified", False)),
        *(("404 Not Found", False), ("410 Gone", False), ("500 Oops", False), ("503 Busy", False)),
    ],
)
async def test_a_status_is_an_answer(site, status, delivered):
    site.paths["/"] = answer(status=status)
    found = await post(site)
    assert (found.status, found.delivered) == (int(status[:3]), delivered)


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_a_redirect_is_not_followed(site, status):
    site.paths |= {"/": moved("/b", status), "/b": answer()}
    found = await post(site)
    assert (found.status, found.delivered) == (int(status[:3]), False)
    assert site.connections == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120.0), (" 0 ", 0.0), ("9" * 400, math.inf), ("", None), ("-5", None), ("1.5", None), ("soon", None),
        ("Wed, 99 Oct 2099", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
    ],
)  # fmt: skip
async def test_retry_after_in_seconds_or_as_a_date(site, text, seconds):
    site.paths["/"] = answer(status="503 Busy", headers={"Retry-After": text})
    assert await post(site) == Answered(503, seconds)


async def test_retry_after_of_a_date_to_come(site):
    date = datetime.datetime.fromtimestamp(time.time() + 300, datetime.UTC)
    text = email.utils.format_datetime(date, usegmt=True)
    site.paths["/"] = answer(status="429 Too Many Requests", headers={"Retry-After": text})
    assert (await post(site)).retry_after == pytest.approx(300, abs=5)


# --- where nothing is sent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("203.0.114.7", "127.0.0.1"), ("::1",), ("169.254.169.254",)])
async def test_a_name_with_a_private_address_is_refused(site, addresses):
    config = site.hooks("media.test:{}")
    error = await refusal(InvalidArgument, "ADDRESS_NOT_ALLOWED", post(site, names=addresses, config=config))
    assert "--webhook-hosts" in str(error)
    assert addresses[0] not in str(error)
    assert site.connections == 0


async def test_a_host_that_only_fetches_may_use_is_refused(site):
    url = site.url("/secret")
    config = site.hooks("other.test:{}")
    assert site.config().outbound_hosts[0] == f"media.test:{site.port}"
    error = await refusal(InvalidArgument, "HOST_NOT_ALLOWED", post(site, url=url, config=config))
    assert f"--webhook-hosts media.test:{site.port}" in str(error)
    assert site.connections == 0


async def test_plain_http_is_refused(site):
    await refusal(InvalidArgument, "SCHEME_NOT_ALLOWED", post(site, url=site.url("/", scheme="http")))
    assert site.connections == 0


async def test_a_certificate_must_be_valid_for_the_name(site):
    config = site.hooks("other.test:{}", "127.0.0.1")
    posting = post(site, url=site.url(host="other.test"), config=config)
    assert "--outbound-ca" in str(await refusal(FailedPrecondition, "CERTIFICATE_INVALID", posting))
    assert site.bodies == []


@pytest.mark.parametrize(
    ("number", "kind", "reason"),
    [
        (socket.EAI_NONAME, FailedPrecondition, "NAME_NOT_FOUND"),
        (socket.EAI_AGAIN, Unavailable, "UNREACHABLE"),
    ],
)
async def test_a_name_that_cannot_be_resolved(site, number, kind, reason):
    await refusal(kind, reason, post(site, names=socket.gaierror(number, "no")))


# --- what a receiver does ---------------------------------------------------------------------------------------------


async def test_a_receiver_that_does_not_answer_is_given_up(site):
    site.paths["/"] = silence
    start = time.monotonic()
    error = await refusal(Unavailable, "TIMEOUT", post(site, config=site.hooks(webhook_timeout=0.3)))
    assert "--webhook-timeout" in str(error)
    assert time.monotonic() - start < 2
    await no_connection(site)


async def test_a_receiver_that_takes_the_connection_alone_is_given_up(site):
    async def deaf(reader, writer):
        await asyncio.sleep(30)

    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = site.hooks(f"media.test:{port}", "127.0.0.1", webhook_timeout=0.3)
    await refusal(Unavailable, "TIMEOUT", post(site, url=f"https://media.test:{port}/", config=config))
    server.close()


@pytest.mark.parametrize(
    "body",
    [endless(), endless(b"x", pause=0.05), answer(b"x", length=1000), answer(b"", length=1 << 40)],
    ids=["huge", "drip", "cut off", "promised"],
)
async def test_the_status_counts_whatever_the_body_is(site, body):
    site.paths["/"] = body
    start = time.monotonic()
    assert await post(site) == Answered(200)
    assert time.monotonic() - start < 2, "no more than a second and 64 KiB of it are read"
    await no_connection(site)


@pytest.mark.parametrize("head", [b"secret\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\n" + b"X: secret\r\n" * 20_000])
async def test_what_is_not_http_is_refused(site, head):
    async def broken(writer):
        writer.write(head)

    site.paths["/"] = broken
    await refusal(Unavailable, "BAD_RESPONSE", post(site))


async def test_cancelled_it_closes_the_connection(site):
    site.paths["/"] = silence
    work = asyncio.create_task(post(site))
    async with asyncio.timeout(10):
        while not site.asked:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await no_connection(site)


async def no_connection(site):
    """Returns when the server has seen the last client leave."""
    async with asyncio.timeout(10):
        while site.open:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)
