import base64
import hashlib

import pytest

from omni_grpc.media_in import check_sha256, decode_image, read_uri
from omni_grpc.types.errors import InvalidArgument
from tests.media_in.files import LIMITS, picture, saved

DATA = saved(picture(), "PNG")
FIELD = "mask.uri"


def read(uri):
    return read_uri(uri, limits=LIMITS, field=FIELD)


def refused(call, *arguments, reason, match="."):
    with pytest.raises(InvalidArgument, match=match) as caught:
        call(*arguments)
    assert caught.value.reason == reason
    assert [violation.field for violation in caught.value.violations] == [FIELD]
    return str(caught.value)


@pytest.mark.parametrize(
    "form",
    [
        base64.b64encode(DATA).decode(),
        base64.b64encode(DATA).decode().rstrip("="),
        base64.urlsafe_b64encode(DATA).decode(),
        base64.encodebytes(DATA).decode(),
        base64.b64encode(DATA).decode().replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
    ],
    ids=["plain", "unpadded", "url-safe", "in lines", "escaped"],
)
@pytest.mark.parametrize("head", ["data:image/png;base64,", "DATA:image/png;charset=utf-8;BASE64,"])
def test_every_valid_form_of_a_data_url_is_read(form, head):
    assert read(head + form) == (DATA, "image/png")


def test_a_data_url_needs_neither_type_nor_base64():
    assert read("data:;base64," + base64.b64encode(DATA).decode()) == (DATA, "")
    assert read("data:,a%20b%00") == (b"a b\0", "")


@pytest.mark.parametrize(
    "body", ["A", "AAAAA", "not base64!", "AA=A", "\u00e4\u00f6\u00fc\u00df", base64.b64encode(DATA).decode()[:109]]
)
def test_broken_base64_is_refused(body):
    refused(read, "data:image/png;base64," + body, reason="INPUT_UNREADABLE", match="base64")


def test_a_data_url_without_its_comma_is_refused():
    refused(read, "data:image/png;base64", reason="INPUT_UNREADABLE", match="comma")


def test_a_data_url_that_lies_about_its_type_is_refused():
    data, kind = read("data:image/webp;base64," + base64.b64encode(DATA).decode())
    refused(
        lambda: decode_image(data, kind, limits=LIMITS, field=FIELD), reason="INPUT_TYPE_MISMATCH", match="image/png"
    )


@pytest.mark.parametrize(
    "uri",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://user:secret@example.org/a.png",
        "http://[::1]/",
        "http://2130706433/",
        "HTTP://10.0.0.1/",
        "ftp://example.org/a.png",
        "file:///etc/passwd",
        "FILE:/etc/passwd",
        "/etc/passwd",
        "../../etc/passwd",
        "a.png",
        "",
        "gs://bucket/a.png",
        "concat:a|b",
        "javascript:alert(1)",
        " data:image/png;base64,AAAA",
    ],
)
def test_every_uri_but_a_data_url_is_refused(uri):
    message = refused(read, uri, reason="URI_NOT_ALLOWED", match="only data URLs")
    assert "secret" not in message
    assert "UploadAsset" in message


def test_a_data_url_that_is_too_long_is_refused_before_it_is_read():
    refused(read, "data:image/png;base64," + "A" * (3 * LIMITS.max_bytes + 4), reason="INPUT_TOO_LARGE")


def test_the_hash_is_checked():
    check_sha256(DATA, b"", field=FIELD)
    check_sha256(DATA, hashlib.sha256(DATA).digest(), field=FIELD)
    refused(lambda: check_sha256(DATA[:-1], hashlib.sha256(DATA).digest(), field=FIELD), reason="INPUT_HASH_MISMATCH")
    as_hex = hashlib.sha256(DATA).hexdigest().encode()
    refused(lambda: check_sha256(DATA, as_hex, field=FIELD), reason="INPUT_HASH_MISMATCH", match="not hex")
