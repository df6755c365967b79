"""Fetching from real servers: what they answer, how much, how slowly, and where their names lead."""

import asyncio
import contextlib
import gzip
import random
import socket
import time

import pytest

from omni_grpc.config import OutboundConfig
from omni_grpc.outbound import Outbound
from omni_grpc.types.errors import ConfigError, FailedPrecondition, InvalidArgument, Unavailable

from .web import answer, endless, moved, silence, web

FIELD = "image.uri"
MOST = 1 << 20
PUBLIC = "203.0.114.7"
LOOPBACK = ("127.0.0.1",)


@pytest.fixture
async def site(tmp_path):
    async with web(tmp_path) as running:
        yield running


class Names:
    """A resolver that gives the next of its answers each time; the last one stays."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def __call__(self, host, port):
        self.asked.append((host, port))
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        return found


async def fetch(site, path="/", *, names=None, config=None, url=None, max_bytes=MOST):
    outbound = Outbound(config or site.config(), resolve=names or Names(LOOPBACK))
    try:
        return await outbound.fetch(url or site.url(path), field=FIELD, max_bytes=max_bytes)
    finally:
        outbound.close()


async def refusal(kind, reason, fetching):
    with pytest.raises(kind) as caught:
        await fetching
    error = caught.value
    assert type(error) is kind
    assert error.reason == f"OUTBOUND_{reason}"
    assert [violation.field for violation in error.violations] == [FIELD]
    assert "secret" not in str(error)
    return error


# --- what arrives -----------------------------------------------------------------------------------------------------


async def test_a_file_arrives_with_its_type_and_the_server_is_asked_by_its_name(site):
    names = Names(LOOPBACK)
    site.paths["/a"] = answer(b"bytes", headers={"Content-Type": "image/png"})
    got = await fetch(site, "/a?b=c#d", names=names)
    assert (got.data, got.content_type, got.final_url) == (b"bytes", "image/png", site.url("/a?b=c#d"))
    assert names.asked == [("media.test", site.port)]
    (head,) = site.asked
    lines = head.split("\r\n")
    assert lines[0] == "GET /a?b=c HTTP/1.1"
    assert f"Host: media.test:{site.port}" in lines
    assert not {line.partition(":")[0].lower() for line in lines} & {"cookie", "referer", "authorization"}


async def test_an_address_is_fetched_without_a_name(site):
    site.paths["/"] = answer(b"bytes")
    names = Names(socket.gaierror())
    config = site.config("127.0.0.1:{}")
    assert (await fetch(site, url=site.url(host="127.0.0.1"), names=names, config=config)).data == b"bytes"
    mapped = site.url(host="[::ffff:127.0.0.1]")
    assert (await fetch(site, url=mapped, names=names, config=config)).data == b"bytes"
    assert names.asked == []


async def test_a_name_outside_of_ascii_is_asked_for_as_dns_has_it(site):
    site.paths["/"] = answer(b"bytes")
    config = site.config("xn--bcher-kva.test:{}", "127.0.0.1")
    names = Names(LOOPBACK)
    assert (await fetch(site, url=site.url(host="B\u00fccher.test."), names=names, config=config)).data == b"bytes"
    assert names.asked == [("xn--bcher-kva.test", site.port)]
    assert f"Host: xn--bcher-kva.test:{site.port}" in site.asked[0]


async def test_plain_http_is_for_entries_that_say_so(tmp_path):
    async with web(tmp_path, tls=False) as site:
        site.paths["/"] = answer(b"bytes")
        url = site.url(scheme="http")
        config = site.config("http://media.test:{}", "127.0.0.1")
        assert (await fetch(site, url=url, config=config)).data == b"bytes"
        await refusal(InvalidArgument, "SCHEME_NOT_ALLOWED", fetch(site, url=url))
        assert len(site.asked) == 1


async def test_the_system_resolves_names(tmp_path):
    async with web(tmp_path, names=("localhost",)) as site:
        site.paths["/"] = answer(b"bytes")
        outbound = Outbound(site.config("localhost:{}", "127.0.0.1", "::1"))
        got = await outbound.fetch(site.url(host="localhost"), field=FIELD, max_bytes=MOST)
        assert got.data == b"bytes"
        outbound.close()


# --- names and addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "addresses", [("127.0.0.1",), (PUBLIC, "127.0.0.1"), ("::1", "2606:4700::1"), ("::ffff:7f00:1",)]
)
async def test_a_name_with_a_private_address_is_refused(site, addresses, caplog):
    config = site.config("media.test:{}")
    error = await refusal(InvalidArgument, "ADDRESS_NOT_ALLOWED", fetch(site, names=Names(addresses), config=config))
    assert "127.0.0.1" not in str(error)
    assert addresses[0] in caplog.text, "the operator is told"
    assert site.connections == 0


async def test_a_name_is_resolved_once_and_its_checked_address_used(site):
    """DNS rebinding: the name has an allowed address when it is checked, and another one when it is asked for again."""
    site.paths["/"] = answer(b"secret")
    config = site.config("media.test:{}", "127.0.0.2")
    names = Names(("127.0.0.2",), LOOPBACK)
    await refusal(Unavailable, "UNREACHABLE", fetch(site, names=names, config=config))
    assert len(names.asked) == 1
    await refusal(InvalidArgument, "ADDRESS_NOT_ALLOWED", fetch(site, names=names, config=config))
    assert site.connections == 0


async def test_the_next_address_is_tried_where_one_takes_no_connection(site):
    site.paths["/"] = answer(b"bytes")
    names, config = Names(("127.0.0.9", "::1", "127.0.0.1")), site.config("media.test:{}", "127.0.0.0/8", "::1")
    assert (await fetch(site, names=names, config=config)).data == b"bytes"


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), FailedPrecondition, "NAME_NOT_FOUND"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), Unavailable, "UNREACHABLE"),
    ],
)
async def test_a_name_that_cannot_be_resolved(site, error, kind, reason):
    assert "media.test" in str(await refusal(kind, reason, fetch(site, names=Names(error))))


# --- redirects --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_a_redirect_is_followed(site, status):
    site.paths |= {"/a": moved("/b?c", status), "/b": moved(site.url("/c", host="x.cdn.test")), "/c": answer(b"bytes")}
    config = site.config("media.test:{}", "*.cdn.test:{}", "127.0.0.1")
    names = Names(LOOPBACK)
    got = await fetch(site, "/a", names=names, config=config)
    assert (got.data, got.final_url) == (b"bytes", site.url("/c", host="x.cdn.test"))
    assert [host for host, _ in names.asked] == ["media.test", "media.test", "x.cdn.test"]
    assert [head.split("\r\n")[0].split(" ")[1] for head in site.asked] == ["/a", "/b?c", "/c"]


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("https://169.254.169.254/latest/secret", "ADDRESS_NOT_ALLOWED"),
        ("https://127.0.0.1/", "PORT_NOT_ALLOWED"),
        ("https://[::1]/", "ADDRESS_NOT_ALLOWED"),
        ("https://10.0.0.1/", "ADDRESS_NOT_ALLOWED"),
        ("//evil.test/secret", "HOST_NOT_ALLOWED"),
        ("https://media.test:22/", "PORT_NOT_ALLOWED"),
        ("http://media.test/", "SCHEME_NOT_ALLOWED"),
        ("http://plain.test/", "SCHEME_NOT_ALLOWED"),
        ("file:///etc/secret", "SCHEME_NOT_ALLOWED"),
        ("ftp://media.test/", "SCHEME_NOT_ALLOWED"),
        ("gopher://127.0.0.1/", "SCHEME_NOT_ALLOWED"),
        ("data:image/png;base64,AAAA", "SCHEME_NOT_ALLOWED"),
        ("https://user:secret@media.test/", "URL_INVALID"),
        ("https://2130706433/", "URL_INVALID"),
        ("https://[secret", "URL_INVALID"),
        ("/\xff", "URL_INVALID"),
    ],
)
async def test_each_redirect_is_checked(site, location, reason):
    site.paths["/"] = moved(location)
    config = site.config("media.test:{}", "http://plain.test", "127.0.0.1:{}")
    await refusal(InvalidArgument, reason, fetch(site, config=config))
    assert site.connections == 1


async def test_a_redirect_to_a_name_with_a_private_address_is_refused(site):
    site.paths["/"] = moved(site.url("/b", host="x.cdn.test"))
    config = site.config("media.test:{}", "*.cdn.test:{}", "127.0.0.1")
    names = Names(LOOPBACK, ("10.0.0.1",))
    await refusal(InvalidArgument, "ADDRESS_NOT_ALLOWED", fetch(site, names=names, config=config))


async def test_a_redirect_to_the_same_name_is_resolved_anew(site):
    site.paths["/"] = moved("/b")
    names = Names(LOOPBACK, ("10.0.0.1",))
    await refusal(InvalidArgument, "ADDRESS_NOT_ALLOWED", fetch(site, names=names))


async def test_redirects_end(site):
    site.paths["/"] = moved("/")
    await refusal(FailedPrecondition, "TOO_MANY_REDIRECTS", fetch(site))
    assert site.connections == 6
    site.paths |= {f"/{n}": moved(f"/{n - 1}") for n in range(1, 6)} | {"/0": answer(b"bytes")}
    assert (await fetch(site, "/5")).data == b"bytes"


async def test_a_redirect_without_a_place_is_a_status(site):
    site.paths["/"] = answer(status="302 Found")
    assert (await refusal(FailedPrecondition, "STATUS", fetch(site))).failure.metadata == {"status": "302"}


# --- what goes wrong on the other side --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("404 Not Found", FailedPrecondition),
        ("401 Unauthorized", FailedPrecondition),
        ("206 Partial Content", FailedPrecondition),
        ("204 No Content", FailedPrecondition),
        ("304 Not Modified", FailedPrecondition),
        ("429 Too Many Requests", Unavailable),
        ("500 Oops", Unavailable),
        ("503 Busy", Unavailable),
    ],
)
async def test_a_status_is_told_and_no_body(site, status, kind):
    body = b"" if status[:3] in ("204", "304") else b"secret"
    site.paths["/"] = answer(body, status=status)
    error = await refusal(kind, "STATUS", fetch(site))
    assert error.failure.metadata == {"status": status[:3]}
    assert status[:3] in str(error)


async def test_a_body_that_ends_early_is_refused(site):
    site.paths["/"] = answer(b"secret", length=100)
    await refusal(Unavailable, "BAD_RESPONSE", fetch(site))


async def test_a_body_that_is_longer_than_it_says_is_cut_off_there(site):
    site.paths["/"] = answer(b"bytes and secret", length=5)
    assert (await fetch(site)).data == b"bytes"


@pytest.mark.parametrize(
    "head",
    [
        b"secret\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nsecret",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nsecret",
        b"HTTP/1.1 200 OK\r\n" + b"X: secret\r\n" * 20_000 + b"\r\n",
        b"",
    ],
    ids=["no http", "negative", "two lengths", "bad chunk", "long head", "nothing"],
)
async def test_what_is_not_http_is_refused(site, head):
    async def broken(writer):
        writer.write(head)

    site.paths["/"] = broken
    await refusal(Unavailable, "BAD_RESPONSE", fetch(site))


async def test_nobody_listens(site):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"https://media.test:{port}/"
    config = site.config(f"media.test:{port}", "127.0.0.1")
    await refusal(Unavailable, "UNREACHABLE", fetch(site, url=url, config=config))


async def test_a_certificate_must_be_valid_for_the_name(site, tmp_path):
    site.paths["/"] = answer(b"secret")
    config = site.config("other.test:{}", "127.0.0.1")
    error = await refusal(
        FailedPrecondition, "CERTIFICATE_INVALID", fetch(site, url=site.url(host="other.test"), config=config)
    )
    assert "--outbound-ca" in str(error)
    (tmp_path / "other").mkdir()
    async with web(tmp_path / "other") as other:
        # its authority is another one, which the first one's clients do not know
        config = site.config(f"media.test:{other.port}", "127.0.0.1")
        await refusal(FailedPrecondition, "CERTIFICATE_INVALID", fetch(other, config=config))
    assert site.asked == other.asked == []


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_a_file_of_authorities_that_cannot_be_read_is_an_error_at_once(site, tmp_path, content):
    path = tmp_path / "other.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--outbound-ca .*other\.pem: \S+") as caught:
        Outbound(OutboundConfig(outbound_ca=str(path)))
    assert caught.value.violations[0].field == "outbound_ca"


async def test_the_environment_has_no_say(site, monkeypatch, tmp_path):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
    site.paths["/"] = answer(b"bytes")
    assert (await fetch(site)).data == b"bytes"


# --- size -------------------------------------------------------------------------------------------------------------


async def test_a_declared_size_is_refused_before_the_body(site):
    site.paths["/"] = answer(b"", length=MOST + 1)
    assert str(MOST) in str(await refusal(InvalidArgument, "TOO_LARGE", fetch(site)))


async def test_the_size_is_counted_while_it_arrives(site):
    site.paths["/"] = endless()
    await refusal(InvalidArgument, "TOO_LARGE", fetch(site))
    await no_connection(site)


async def test_a_file_of_just_the_limit_is_taken(site):
    site.paths["/"] = answer(bytes(1000))
    assert len((await fetch(site, max_bytes=1000)).data) == 1000
    await refusal(InvalidArgument, "TOO_LARGE", fetch(site, max_bytes=999))


@pytest.mark.parametrize("name", ["gzip", "X-GZIP"])
async def test_gzip_is_decoded(site, name):
    data = random.Random(3).randbytes(100_000) + bytes(3_000_000)
    members = gzip.compress(data[:50_000]) + gzip.compress(data[50_000:])
    site.paths["/"] = answer(members, headers={"Content-Encoding": name})
    assert (await fetch(site, max_bytes=4_000_000)).data == data


async def test_a_gzip_bomb_is_refused(site):
    bomb = gzip.compress(bytes(200 << 20), 9)
    assert len(bomb) < MOST
    site.paths["/"] = answer(bomb, headers={"Content-Encoding": "gzip"})
    start = time.perf_counter()
    await refusal(InvalidArgument, "TOO_LARGE", fetch(site))
    assert time.perf_counter() - start < 2


async def test_what_is_sent_is_counted_where_it_decodes_to_nothing(site):
    site.paths["/"] = endless(gzip.compress(b"") * 500, encoding="gzip")
    await refusal(InvalidArgument, "TOO_LARGE", fetch(site))


@pytest.mark.parametrize("cut", [slice(0, -9), slice(0, 5), slice(4, None)])
async def test_broken_gzip_is_refused(site, cut):
    site.paths["/"] = answer(gzip.compress(random.Random(3).randbytes(1000))[cut], headers={"Content-Encoding": "gzip"})
    await refusal(Unavailable, "BAD_RESPONSE", fetch(site))


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "secret"])
async def test_other_encodings_are_refused(site, encoding):
    site.paths["/"] = answer(b"secret", headers={"Content-Encoding": encoding})
    await refusal(FailedPrecondition, "BAD_RESPONSE", fetch(site))


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [silence, endless(b"x", pause=0.05)], ids=["silence", "drip"])
async def test_the_time_is_limited(site, slow):
    site.paths["/"] = slow
    error = await refusal(Unavailable, "TIMEOUT", fetch(site, config=site.config(outbound_timeout=0.3)))
    assert "--outbound-timeout" in str(error)
    await no_connection(site)


async def test_the_time_is_that_of_all_redirects(site):
    async def slow(writer):
        await asyncio.sleep(0.2)
        await moved("/")(writer)

    site.paths["/"] = slow
    await refusal(Unavailable, "TIMEOUT", fetch(site, config=site.config(outbound_timeout=0.5)))
    assert site.connections <= 3


async def test_a_connect_that_hangs_is_given_up(site):
    """A listener that takes connections and does not speak TLS, and one whose queue is full."""

    async def hang(reader, writer):
        await asyncio.sleep(60)

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = site.config(f"media.test:{port}", "127.0.0.1", outbound_timeout=0.3)
    await refusal(Unavailable, "TIMEOUT", fetch(site, url=f"https://media.test:{port}/", config=config))
    server.close()
    with full("127.0.0.1") as port:
        config = site.config(f"media.test:{port}", "127.0.0.1", outbound_timeout=0.3)
        await refusal(Unavailable, "TIMEOUT", fetch(site, url=f"https://media.test:{port}/", config=config))


async def test_an_address_that_hangs_leaves_time_for_the_next(site):
    site.paths["/"] = answer(b"bytes")
    with full("127.0.0.9", site.port):
        config = site.config(outbound_timeout=1.0)
        assert (await fetch(site, names=Names(("127.0.0.9", "127.0.0.1")), config=config)).data == b"bytes"


@contextlib.contextmanager
def full(host, port=0):
    """A port whose queue of connections is full, so that the next one gets no answer."""
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind((host, port))
        listener.listen(0)
        for one in (first, second):
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


async def test_a_resolver_that_hangs_is_given_up(site):
    async def hang(host, port):
        await asyncio.sleep(60)

    await refusal(Unavailable, "TIMEOUT", fetch(site, names=hang, config=site.config(outbound_timeout=0.2)))


async def test_cancelled_it_closes_the_connection(site):
    site.paths["/"] = silence
    work = asyncio.create_task(fetch(site))
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
