"""Encoded input bytes: their type by the first bytes, their checksum, and data: URLs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import urllib.parse
from collections.abc import Callable, Mapping
from typing import NoReturn

from omni_grpc.media_in.limits import MediaLimits
from omni_grpc.media_in.refusal import EMPTY, HASH_MISMATCH, TOO_LARGE, TYPE_MISMATCH, UNREADABLE, URI_REFUSED, refusal

_NAMES: Mapping[str, str] = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/x-png": "image/png",
    "image/x-ms-bmp": "image/bmp",
    "image/tif": "image/tiff",
    "audio/x-wav": "audio/wav",
    "audio/wave": "audio/wav",
    "audio/vnd.wave": "audio/wav",
    "audio/x-flac": "audio/flac",
    "audio/mp3": "audio/mpeg",
    "audio/opus": "audio/ogg",
    "video/ogg": "audio/ogg",
    "application/ogg": "audio/ogg",
    # the same containers, whatever is in them
    "video/quicktime": "video/mp4",
    "video/x-m4v": "video/mp4",
    "audio/mp4": "video/mp4",
    "audio/m4a": "video/mp4",
    "audio/x-m4a": "video/mp4",
    "audio/webm": "video/webm",
    "video/matroska": "video/webm",
    "video/x-matroska": "video/webm",
    "audio/x-matroska": "video/webm",
}
"""Other names of the types that `kind_of` finds."""

_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
    (b"\x1a\x45\xdf\xa3", "video/webm"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"<svg", "image/svg+xml"),
    (b"<?xml", "text/xml"),
    (b"%PDF", "application/pdf"),
)
_RIFF: Mapping[bytes, str] = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BRANDS: Mapping[bytes, str] = {
    b"avif": "image/avif",
    b"avis": "image/avif",
    b"heic": "image/heic",
    b"heix": "image/heic",
    b"mif1": "image/heic",
}


def kind_of(data: bytes) -> str:
    """The MIME type by the first bytes; empty if they match none."""
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12], "")
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "video/mp4")
    for start, kind in _STARTS:
        if data.startswith(start):
            return kind
    # a frame of MPEG audio, layer 3: eleven bits of sync, a version that is not reserved, layer bits 01
    if len(data) > 2 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2 and data[1] & 0x18 != 0x08:
        return "audio/mpeg"
    return ""


def checked_kind(data: bytes, mime_type: str, accepted: tuple[str, ...], limits: MediaLimits, field: str) -> str:
    """Which of the accepted types the bytes are. Raises InvalidArgument where they are none, are not what was declared,
    are missing or are too many.
    """
    if not data:
        raise refusal(field, EMPTY, "has no bytes; leave the field unset if there is no such input")
    if len(data) > limits.max_bytes:
        raise refusal(field, TOO_LARGE, f"has {len(data)} bytes; the maximum is {limits.max_bytes}")
    found = kind_of(data)
    declared = mime_type.partition(";")[0].strip().lower()
    declared = _NAMES.get(declared, declared)
    if declared not in ("", "application/octet-stream", found):
        raise refusal(
            field,
            TYPE_MISMATCH,
            f"has mime_type {mime_type}, but its bytes are {found or 'of an unknown type'}; leave mime_type empty to "
            "detect the type",
        )
    if found not in accepted:
        raise refusal(field, UNREADABLE, f"is {found or 'of an unknown type'}; send one of {', '.join(accepted)}")
    return found


def check_sha256(data: bytes, sha256: bytes, *, field: str) -> None:
    """Raises InvalidArgument unless this is the SHA-256 of the bytes (32 bytes; empty: not checked)."""
    check_length(sha256, field=field)
    if not sha256:
        return
    found = hashlib.sha256(data).digest()
    if found != sha256:
        raise refusal(
            field,
            HASH_MISMATCH,
            f"has the sha256 {found.hex()}, not {sha256.hex()}; {len(data)} bytes arrived, send it again",
        )


def check_length(sha256: bytes, *, field: str) -> None:
    """Raises InvalidArgument unless this can be a SHA-256, or is empty."""
    if len(sha256) not in (0, 32):
        raise refusal(field, HASH_MISMATCH, f"has a sha256 of {len(sha256)} bytes; send the 32 raw bytes, not hex")


def scheme_of(uri: str) -> str:
    """The scheme of a URL in lower case, empty if it has none."""
    scheme, colon, _ = uri.partition(":")
    return scheme.lower() if colon else ""


def refuse_uri(uri: str, *, field: str) -> NoReturn:
    """Raises InvalidArgument for a URL of a kind that is not read."""
    # the address itself is not repeated: it may hold a secret
    what = f"is a {scheme_of(uri)[:16]} URL" if scheme_of(uri) else "is not a URL"
    raise refusal(
        field,
        URI_REFUSED,
        f"{what}; this server accepts only data URLs (data:image/png;base64,...), and https URLs of the hosts that its"
        " operator lists with --outbound-hosts: send the bytes in `data`, or upload them with UploadAsset",
    )


def read_uri(uri: str, *, limits: MediaLimits, field: str) -> tuple[bytes, str]:
    """Bytes and declared MIME type of a data URL (RFC 2397), base64 or percent-encoded.

    Base64 may lack its padding and may use the url-safe alphabet. Raises InvalidArgument for any other URL: files are
    not opened, and what is fetched is fetched before (`fetch`).
    """
    if scheme_of(uri) != "data":
        refuse_uri(uri, field=field)
    rest = uri.partition(":")[2]
    header, comma, body = rest.partition(",")
    if not comma:
        raise refusal(field, UNREADABLE, "is a data URL without a comma; the form is data:image/png;base64,...")
    # 4 characters of base64 are 3 bytes, one percent-encoded byte is 3 characters
    if len(body) > 3 * limits.max_bytes:
        raise refusal(field, TOO_LARGE, f"has {len(body)} characters; the maximum is {limits.max_bytes} bytes")
    mime_type, *parameters = header.split(";")
    is_base64 = any(parameter.strip().lower() == "base64" for parameter in parameters)
    decode: Callable[[str], bytes] = _base64 if is_base64 else urllib.parse.unquote_to_bytes
    try:
        return decode(body), mime_type.strip()
    except ValueError as error:
        raise refusal(field, UNREADABLE, f"is a data URL with invalid base64 ({error})") from None


def _base64(text: str) -> bytes:
    compact = "".join(urllib.parse.unquote(text).split()).replace("-", "+").replace("_", "/").rstrip("=")
    if len(compact) % 4 == 1:
        raise binascii.Error(f"{len(compact)} characters without padding, which is one too many or three too few")
    return base64.b64decode(compact + "=" * (-len(compact) % 4), validate=True)
