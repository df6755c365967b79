"""Which kind of place a setting names."""

from __future__ import annotations

import urllib.parse
from pathlib import Path

from omni_grpc.store.blobs.folder import FolderBlobs
from omni_grpc.store.seam import Blobs
from omni_grpc.types.errors import ConfigError

_POSSIBLE = "give a folder (/var/lib/omni, file:///var/lib/omni) or a bucket (s3://bucket/prefix?region=...)"


def artifacts_at(place: str | Path) -> Blobs:
    """Where outputs are kept: a path or a `file://` address is a folder, `s3://` an S3-compatible object store. It is
    not opened. Raises ConfigError for anything else.
    """
    if isinstance(place, Path):
        return FolderBlobs(place)
    scheme, separator, rest = place.partition("://")
    if not separator and place and "\0" not in place:
        return FolderBlobs(Path(place))
    match scheme.lower():
        case "file":
            return FolderBlobs(_path_of(rest))
        case "s3":
            # its library is loaded where it is asked for alone
            from omni_grpc.store.blobs.s3 import S3Blobs
            from omni_grpc.store.blobs.s3_url import bucket_of

            return S3Blobs(bucket_of(place))
    # not the whole address: it may hold a password
    named = f"{scheme}:// is not supported" if separator else "it names nothing"
    raise ConfigError(f"artifact_url: {named}; {_POSSIBLE}")


def _path_of(rest: str) -> Path:
    host, slash, path = rest.partition("/")
    path = urllib.parse.unquote(slash + path)
    if host not in ("", "localhost") or path in ("", "/") or "\0" in path:
        raise ConfigError(f"artifact_url: a file address is file:///absolute/path; {_POSSIBLE}")
    return Path(path)
