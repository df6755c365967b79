"""The media of a request: read from what the caller gave, sent inside the request or uploaded first."""

from __future__ import annotations

import hashlib
import mimetypes
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.message import Message

from omni_grpc.client.pictures import NotMedia, encoded_array, encoded_picture
from omni_grpc.types.results import Artifact
from omni_grpc.v1.artifact_pb2 import UploadAssetRequest, UploadAssetResponse, UploadHeader
from omni_grpc.v1.media_pb2 import MediaInput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import PIL.Image

MediaSource: TypeAlias = "str | Path | bytes | PIL.Image.Image | npt.NDArray[np.uint8] | UploadAssetResponse | Artifact"
"""A path, a data: URL, an https URL that the server may fetch, the bytes of a file, a PIL image, a uint8 array (height
x width, or that x 3 or x 4), what `upload` returned, or an output of an earlier job. The same picture gives the same
pixels and warnings in each form.
"""

INLINE_BYTES = 4 << 20
"""The most bytes of media that are sent inside a request. If there are more, all of them are uploaded first."""
URLS = ("data:", "https://", "http://")
"""How a string that is no path begins. The client opens none of them."""
CHUNK_BYTES = 512 * 1024
UNKNOWN_TYPE = "application/octet-stream"


def media_input(value: Any) -> MediaInput:
    """A `MediaSource` as the API takes it.

    The type of a file is found from its bytes, never from its name. Raises OSError for an unreadable file, NotMedia for
    a picture or an array that cannot be sent, TypeError for any other value.
    """
    match value:
        case str() if value.lower().startswith(URLS):
            return MediaInput(uri=value)
        case str() | Path():
            return MediaInput(data=Path(value).read_bytes())
        case bytes() | bytearray() | memoryview():
            return MediaInput(data=bytes(value))
        case UploadAssetResponse():
            return MediaInput(asset_id=value.asset_id)
        case Artifact():
            return MediaInput(asset_id=value.artifact_id, mime_type=value.mime_type)
    # a PIL image or an array can only exist if its library has been imported, so neither is imported here
    pil, numpy = sys.modules.get("PIL.Image"), sys.modules.get("numpy")
    if pil is not None and isinstance(value, pil.Image):
        data, mime_type = encoded_picture(value)
        return MediaInput(data=data, mime_type=mime_type)
    if numpy is not None and isinstance(value, numpy.ndarray):
        data, mime_type = encoded_array(value)
        return MediaInput(data=data, mime_type=mime_type)
    raise TypeError(value)


def file_input(value: str | Path | bytes) -> MediaInput:
    """A path or bytes, for an upload. Raises OSError for an unreadable file, TypeError for any other value."""
    media = media_input(value)
    if not media.HasField("data"):
        raise TypeError(f"{str(value)[:40]!r} is not a path; upload takes a path or bytes")
    if isinstance(value, str | Path):
        media.mime_type = mimetypes.guess_type(value)[0] or ""
    return media


def media_inputs(values: Any) -> list[MediaInput]:
    """A list of them. Raises TypeError for a single one, since a path is also a sequence of characters."""
    if isinstance(values, str | bytes | Path) or not isinstance(values, Sequence):
        raise TypeError(values)
    found = []
    for i, value in enumerate(values):
        try:
            found.append(media_input(value))
        except NotMedia as error:
            raise NotMedia(f"[{i}] {error}") from error
    return found


def too_large(request: Message) -> list[MediaInput]:
    """The media of a request that must be uploaded first: all that hold bytes, or none."""
    inline = [media for media in _media(request) if media.HasField("data")]
    return inline if sum(len(media.data) for media in inline) > INLINE_BYTES else []


def upload_messages(data: bytes, mime_type: str) -> Iterator[UploadAssetRequest]:
    """The messages of an upload: the header, then the bytes in chunks."""
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
