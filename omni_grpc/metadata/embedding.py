"""Text in files of pictures, video and sound: put in without touching what is encoded, and read again.

Pictures get chunks of their own, beside those that are there; video and sound are copied packet by packet into a new
container, which has the text as its comment.

| format | where the JSON is | beside it |
| --- | --- | --- |
| PNG | text chunk `omni_grpc` | `parameters`, as AUTOMATIC1111 writes it |
| JPEG, WebP | EXIF ImageDescription | the same in EXIF UserComment |
| MP4, WebM, WAV, FLAC, MP3, Opus | `comment` | |
| raw pixels | nowhere | |
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omni_grpc.types.media import ImageFormat, OutputFormat
from omni_grpc.types.os_errors import plain
from omni_grpc.types.parameters import MARK, NotEmbedded, Parameters, is_ours, no_parameters, read_parameters

PNG = b"\x89PNG\r\n\x1a\n"
_DESCRIPTION, _EXIF_IFD, _USER_COMMENT = 0x010E, 0x8769, 0x9286
_UNICODE = b"UNICODE\0"
_SEGMENT = 0xFFFF - 2
"""The most bytes in one segment of a JPEG."""
_TEXT_BYTES = 16 << 20
"""The longest text chunk that is read."""


def embedded(data: bytes, kind: OutputFormat, text: str, infotext: str) -> bytes:
    """The file with `text` (ASCII) in it, and in pictures `infotext` beside it.

    Raises NotEmbedded for a file that is not of this format, is damaged, or has no room for the text.
    """
    try:
        match kind:
            case ImageFormat.PNG:
                return _png_with(data, text, infotext)
            case ImageFormat.JPEG:
                return _jpeg_with(data, text, infotext)
            case ImageFormat.WEBP:
                return _webp_with(data, text, infotext)
            case ImageFormat.RAW_RGB8:
                raise NotEmbedded("raw pixels have no place for them")
        # here, because codecs are worth loading only where there is video or sound
        from omni_grpc.metadata.remuxing import remuxed

        return remuxed(data, kind, text)
    except (struct.error, IndexError) as error:
        raise NotEmbedded(f"the file is not {kind}, or damaged") from error
    except ModuleNotFoundError as error:
        raise NotEmbedded(_without(error)) from error


def has_parameters(data: bytes) -> bool:
    """Whether a file has a text of ours, whole or not. A file that cannot be read has none."""
    try:
        return any(is_ours(text) for text in _texts(data))
    except _NoMedia:
        return False


def parameters_in(path: Path) -> Parameters:
    """The parameters that are in a file. Raises FailedPrecondition (NO_PARAMETERS) where there are none, OSError for a
    file that cannot be read.
    """
    data = path.read_bytes()
    try:
        text = next((text for text in _texts(data) if is_ours(text)), None)
    except _NoMedia as error:
        raise no_parameters(str(path), str(error)) from error
    if text is None:
        raise no_parameters(str(path), "there is no text of ours in it")
    return read_parameters(text, str(path))


class _NoMedia(Exception):
    """A file that is no picture, video or sound, or is damaged. Its text says which."""


def _without(error: ModuleNotFoundError) -> str:
    """What to do where the client is installed without what reads and writes media."""
    return f"{error.name} is not installed; pip install 'omni-grpc-client[media]'"


def _texts(data: bytes) -> Iterator[str | bytes]:
    """The texts of a file in which ours may be. Raises _NoMedia."""
    try:
        yield from _texts_of(data)
    except ModuleNotFoundError as error:
        raise _NoMedia(_without(error)) from error


def _texts_of(data: bytes) -> Iterator[str | bytes]:
    if data.startswith(PNG):
        yield from _png_texts(data)
    elif data.startswith(b"\xff\xd8\xff") or (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        yield from _exif_texts(data)
    else:
        from omni_grpc.metadata.remuxing import comments

        try:
            yield from comments(data)
        except ValueError as error:
            raise _NoMedia(f"it is no picture, video or sound that can be read ({error})") from error


# --- PNG --------------------------------------------------------------------------------------------------------------


def _png_with(data: bytes, text: str, infotext: str) -> bytes:
    if not data.startswith(PNG):
        raise NotEmbedded("the file is not PNG")
    (header,) = struct.unpack_from(">I", data, len(PNG))
    end = len(PNG) + header + 12
    chunks = _png_text(MARK, text) + _png_text("parameters", infotext)
    return data[:end] + chunks + data[end:]


def _png_text(key: str, text: str) -> bytes:
    """A text chunk: tEXt where Latin-1 has all of it, which more readers know, else iTXt in UTF-8."""
    try:
        return _chunk(b"tEXt", key.encode() + b"\0" + text.encode("latin-1"))
    except UnicodeEncodeError:
        return _chunk(b"iTXt", key.encode() + b"\0\0\0\0\0" + text.encode("utf-8", "replace"))


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _png_texts(data: bytes) -> Iterator[bytes]:
    at = len(PNG)
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        if name in (b"tEXt", b"iTXt") and length <= _TEXT_BYTES:
            key, _, text = data[at + 8 : at + 8 + length].partition(b"\0")
            if key.decode("latin-1") == MARK:
                yield text if name == b"tEXt" else text.split(b"\0", 4)[-1]
        at += 12 + length


# --- JPEG and WebP ----------------------------------------------------------------------------------------------------


def _exif(text: str, infotext: str) -> bytes:
    """An EXIF block with both texts, without the six bytes before it in a JPEG."""
    import PIL.Image

    exif = PIL.Image.Exif()
    exif[_DESCRIPTION] = text
    exif.get_ifd(_EXIF_IFD)[_USER_COMMENT] = _UNICODE + infotext.encode("utf-16-be", "replace")
    return exif.tobytes().removeprefix(b"Exif\0\0")


def _jpeg_with(data: bytes, text: str, infotext: str) -> bytes:
    if not data.startswith(b"\xff\xd8\xff"):
        raise NotEmbedded("the file is not JPEG")
    content = b"Exif\0\0" + _exif(text, infotext)
    if len(content) > _SEGMENT:
        raise NotEmbedded(f"they take {len(content)} bytes, and a JPEG has room for {_SEGMENT}; use another format")
    at = 2
    if data[at : at + 2] == b"\xff\xe0":  # the JFIF header stays first
        at += 2 + int(struct.unpack_from(">H", data, at + 2)[0])
    return data[:at] + b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content + data[at:]


def _webp_with(data: bytes, text: str, infotext: str) -> bytes:
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        raise NotEmbedded("the file is not WEBP")
    body = data[12 : 8 + int(struct.unpack_from("<I", data, 4)[0])]
    if body[:4] == b"VP8X":
        flags = body[8] | 0x08
        body = body[:8] + bytes([flags]) + body[9:]
    else:
        body = _webp_header(data, body[:4]) + body
    body += _riff(b"EXIF", _exif(text, infotext))
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def _webp_header(data: bytes, first: bytes) -> bytes:
    """The header of an extended file, for one that has EXIF: flags and size. Only it can say that there is EXIF."""
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(data)) as image:
            width, height, alpha = image.width, image.height, "A" in image.mode
    except OSError as error:
        raise NotEmbedded("the file is not WEBP, or damaged") from error
    flags = 0x08 | (0x10 if alpha and first == b"VP8L" else 0)
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return _riff(b"VP8X", bytes([flags, 0, 0, 0]) + size)


def _riff(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def _exif_texts(data: bytes) -> Iterator[str]:
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(data)) as image:
            found: Any = image.getexif().get(_DESCRIPTION)
    except Exception as error:  # a decoder raises anything for a file that is damaged
        raise _NoMedia(f"it is damaged ({plain(error)})") from error
    if isinstance(found, str):
        yield found
