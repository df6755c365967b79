"""Signed addresses that say as which file they are to be kept.

obstore signs an address without that. With the secret key at hand it is signed again, by AWS Signature Version 4
(https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import urllib.parse

_SIGNATURE = "X-Amz-Signature"
_PLAIN = re.compile(r"[^A-Za-z0-9 ._()-]")


def with_answers(url: str, mime_type: str, filename: str) -> str:
    """The address, with the type and the name of the file in its answer. As it is where it was not signed with the keys
    of the environment, since then nobody but obstore has the secret.
    """
    parts = urllib.parse.urlsplit(url)
    query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    signature = query.pop(_SIGNATURE, "")
    secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    if not secret or not hmac.compare_digest(_signature(parts, query, secret), signature):
        return url
    if mime_type:
        query["response-content-type"] = mime_type
    if filename:
        query["response-content-disposition"] = _disposition(filename)
    signed = _canonical(query) + f"&{_SIGNATURE}={_signature(parts, query, secret)}"
    return parts._replace(query=signed).geturl()


def _disposition(filename: str) -> str:
    """RFC 6266: the name in ASCII for old readers, and as it is."""
    exact = urllib.parse.quote(filename, safe="", encoding="utf-8")
    return f"attachment; filename=\"{_PLAIN.sub('_', filename)}\"; filename*=UTF-8''{exact}"


def _canonical(query: dict[str, str]) -> str:
    pairs = sorted((_quoted(name), _quoted(value)) for name, value in query.items())
    return "&".join(f"{name}={value}" for name, value in pairs)


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="-_.~")


def _signature(parts: urllib.parse.SplitResult, query: dict[str, str], secret: str) -> str:
    scope = query.get("X-Amz-Credential", "").partition("/")[2]
    request = f"GET\n{parts.path}\n{_canonical(query)}\nhost:{parts.netloc}\n\nhost\nUNSIGNED-PAYLOAD"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    for step in scope.split("/"):
        key = _hmac(key, step)
    return _hmac(key, f"AWS4-HMAC-SHA256\n{query.get('X-Amz-Date', '')}\n{scope}\n{digest}").hex()


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
