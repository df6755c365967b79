"""The address of a bucket as a user writes it: `s3://bucket/prefix?endpoint=https://...&region=...`."""

from __future__ import annotations

import dataclasses
import re
import urllib.parse

from omni_grpc.store.blobs.names import valid
from omni_grpc.types.errors import ConfigError

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_REGION = re.compile(r"[A-Za-z0-9-]{1,60}")
_OPTIONS = ("endpoint", "region", "allow_http", "virtual_hosted")


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, and where in it. Empty `endpoint` and `region`: those of the environment, or AWS's own. `allow_http`:
    over connections that are not encrypted. `virtual_hosted`: the endpoint names the bucket already.
    """

    name: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    allow_http: bool = False
    virtual_hosted: bool = False

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/")


def bucket_of(url: str) -> Bucket:
    """Raises ConfigError where the address is none. No message holds a value of it: it might be a password."""
    parts = urllib.parse.urlsplit(url)
    if "@" in parts.netloc:
        raise _error("it holds credentials; give them by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or by a role")
    if not _BUCKET.fullmatch(parts.netloc) or parts.fragment:
        raise _error("it names no bucket")
    prefix = urllib.parse.unquote(parts.path).strip("/")
    if prefix and not valid(prefix):
        raise _error("its prefix may have letters, digits, `._-` and single slashes")
    options = urllib.parse.parse_qsl(parts.query, keep_blank_values=True)
    given = dict(options)
    for name in given:
        if name not in _OPTIONS:
            what = f"{name!r} is not an option" if re.fullmatch(r"\w{1,40}", name) else "it has an unknown option"
            raise _error(f"{what}: those are {', '.join(_OPTIONS)}; credentials are given by the environment")
    if len(given) < len(options):
        raise _error("an option is given twice")
    if "region" in given and not _REGION.fullmatch(given["region"]):
        raise _error("its region is letters, digits and hyphens")
    allow_http = _flag(given, "allow_http")
    endpoint = given.get("endpoint", "").rstrip("/")
    if "endpoint" in given:
        _check_endpoint(endpoint, allow_http)
    return Bucket(parts.netloc, prefix, endpoint, given.get("region", ""), allow_http, _flag(given, "virtual_hosted"))


def _check_endpoint(endpoint: str, allow_http: bool) -> None:
    parts = urllib.parse.urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise _error("its endpoint is https://host or https://host:port")
    if "@" in parts.netloc:
        raise _error("its endpoint holds credentials; give them by the environment")
    if parts.scheme == "http" and not allow_http:
        raise _error("its endpoint is not encrypted; give an https:// one, or add allow_http=true")


def _flag(given: dict[str, str], name: str) -> bool:
    match given.get(name, "false").lower():
        case "true" | "1":
            return True
        case "false" | "0":
            return False
    raise _error(f"{name} is true or false")


def _error(what: str) -> ConfigError:
    return ConfigError(f"artifact_url: {what}; give s3://bucket/prefix?endpoint=https://host&region=...")
