"""Media that a request brings along: read from where the caller has them, sent inside of the request or uploaded."""

from __future__ import annotations

import hashlib
import io
import mimetypes
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.message import Message

from omni_grpc.types.results import Artifact
from omni_grpc.v1.artifact_pb2 import UploadAssetRequest, UploadAssetResponse, UploadHeader
from omni_grpc.v1.media_pb2 import MediaInput

if TYPE_CHECKING:
    import PIL.Image

Media: TypeAlias = "str | Path | bytes | PIL.Image.Image | UploadAssetResponse | Artifact"
"""A path, a data: URI, the bytes of a file, a picture, what `upload` returned, or an output of an earlier job."""

INLINE_BYTES = 4 << 20
"""Most bytes of media that travel inside of a request; with more, all of them are uploaded first."""
CHUNK_BYTES = 512 * 1024
UNKNOWN_TYPE = "application/octet-stream"


def media_input(value: Any) -> MediaInput:
    """A `Media` as the API takes it. Raises OSError for a file that cannot be read, TypeError for anything else."""
    match value:
        case str() if value.startswith("data:"):
            return MediaInput(uri=value)
        case str() | Path():
            return MediaInput(data=Path(value).read_bytes(), mime_type=mimetypes.guess_type(value)[0] or "")
        case bytes() | bytearray() | memoryview():
            return MediaInput(data=bytes(value))
        case UploadAssetResponse():
            return MediaInput(asset_id=value.asset_id)
        case Artifact():
            return MediaInput(asset_id=value.id, mime_type=value.mime_type)
    # whoever has a picture has loaded PIL, which is not worth loading for those who have none
    pil = sys.modules.get("PIL.Image")
    if pil is not None and isinstance(value, pil.Image):
        buffer = io.BytesIO()
        value.save(buffer, "PNG")
        return MediaInput(data=buffer.getvalue(), mime_type="image/png")
    raise TypeError(value)


def file_input(value: str | Path | bytes) -> MediaInput:
    """What can be uploaded: a path or bytes. Raises OSError for a file that cannot be read, TypeError for all else."""
    media = media_input(value)
    if not media.HasField("data"):
        raise TypeError(f"{str(value)[:40]!r} is no path; upload takes a path or bytes")
    return media


def media_inputs(values: Any) -> list[MediaInput]:
    """Several of them. A single one is not taken for a list: a path is a sequence of letters."""
    if isinstance(values, str | bytes | Path) or not isinstance(values, Sequence):
        raise TypeError(values)
    return [media_input(value) for value in values]


def too_large(request: Message) -> list[MediaInput]:
    """The media of a request that are to be uploaded first: all of its bytes, or none."""
    inline = [media for media in _media(request) if media.HasField("data")]
    return inline if sum(len(media.data) for media in inline) > INLINE_BYTES else []


def upload_messages(data: bytes, mime_type: str) -> Iterator[UploadAssetRequest]:
    """The header, then the bytes in chunks."""
    header = UploadHeader(
        mime_type=mime_type or UNKNOWN_TYPE, size_bytes=len(data), sha256=hashlib.sha256(data).digest()
    )
    yield UploadAssetRequest(header=header)
    for offset in range(0, len(data), CHUNK_BYTES):
        yield UploadAssetRequest(data=data[offset : offset + CHUNK_BYTES])


def _media(request: Message) -> Iterator[MediaInput]:
    for field, value in request.ListFields():
        if field.message_type is not None and field.message_type.full_name == MediaInput.DESCRIPTOR.full_name:
            yield from value if field.is_repeated else (value,)
