"""PNG files without the chunks that no picture needs.

PIL inflates texts and color profiles while it opens a file, and refuses the file where they are large. Neither is used
here, so they are taken out before it sees them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

_SIGNATURE = 8
_FRAME = 12
"""Bytes of a chunk around its data: length, type, checksum."""

_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_ORIENTED = (b"XML:com.adobe.xmp", b"Raw profile type exif", b"exif")
"""Keywords of the texts in which programs write EXIF data, and with it how the picture is to be turned."""

_MAX_TEXT = 1 << 20
"""The most bytes that PIL inflates a text to."""


def without_metadata(data: bytes) -> bytes:
    """The PNG without color profiles and texts, but for those that may say how it is to be turned. Everything else
    stays as it is, also where the file is broken or cut off: that is for the decoder to say.
    """
    view = memoryview(data)
    kept = [(0, _SIGNATURE)]
    for start, end, kind in _chunks(view):
        if kind == b"iCCP" or (kind in _TEXTS and not _oriented(kind, view[start + 8 : end - 4])):
            continue
        if kept[-1][1] == start:
            kept[-1] = (kept[-1][0], end)
        else:
            kept.append((start, end))
    return data if len(kept) == 1 else b"".join(view[start:end] for start, end in kept)


def _chunks(view: memoryview) -> Iterator[tuple[int, int, bytes]]:
    """Start, end and type of each chunk. What is no whole chunk any more is one of no type."""
    start = _SIGNATURE
    while start < len(view):
        end = start + _FRAME + int.from_bytes(view[start : start + 4], "big")
        if end > len(view):
            yield start, len(view), b""
            return
        yield start, end, bytes(view[start + 4 : start + 8])
        start = end


def _oriented(kind: bytes, text: memoryview) -> bool:
    keyword, _, rest = bytes(text[: _MAX_TEXT + 1]).partition(b"\0")
    if keyword not in _ORIENTED or len(text) > _MAX_TEXT:
        return False
    if kind == b"zTXt":
        return _inflates(rest[1:])
    if kind == b"iTXt" and rest[:1] == b"\1":
        # compressed: flag, method, language, translated keyword, text
        return _inflates(rest[2:].split(b"\0", 2)[-1])
    return True


def _inflates(text: bytes) -> bool:
    """Whether a compressed text is whole and small enough for PIL."""
    inflater = zlib.decompressobj()
    try:
        inflater.decompress(text, _MAX_TEXT)
    except zlib.error:
        return False
    return not inflater.unconsumed_tail
