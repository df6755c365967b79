"""Video and sound in a new container with a comment: the packets are copied, and nothing is encoded again."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from pathlib import Path

import av

from omni_grpc.types.media import AudioFormat, OutputFormat, VideoFormat
from omni_grpc.types.os_errors import plain
from omni_grpc.types.parameters import NotEmbedded

_CONTAINERS: Mapping[OutputFormat, tuple[str, Mapping[str, str]]] = {
    # as the worker writes them: the index in front, or one fragment for each keyframe
    VideoFormat.MP4: ("mp4", {"movflags": "faststart"}),
    VideoFormat.FMP4: ("mp4", {"movflags": "frag_keyframe+delay_moov+default_base_moof"}),
    VideoFormat.WEBM: ("webm", {}),
    AudioFormat.WAV: ("wav", {}),
    AudioFormat.FLAC: ("flac", {}),
    AudioFormat.MP3: ("mp3", {}),
    AudioFormat.OPUS: ("ogg", {}),
}
_COMMENT = "comment"


def remuxed(data: bytes, kind: OutputFormat, text: str) -> bytes:
    """The file with `text` as its comment. Raises NotEmbedded for a file that is not of this format."""
    container, muxing = _CONTAINERS[kind]
    options = {"fflags": "+bitexact", **muxing}
    try:
        # a file with a name, since the muxer of MP4 reads it again to move the index to its front
        with tempfile.NamedTemporaryFile(suffix=f".{container}") as target:
            with (
                av.open(io.BytesIO(data), "r") as source,
                av.open(target.name, "w", format=container, options=options) as output,
            ):
                _copy(source, output, text)
            return Path(target.name).read_bytes()
    except OSError as error:
        raise NotEmbedded(f"{plain(error)}, in {tempfile.gettempdir()}; set TMPDIR") from error
    except (av.FFmpegError, ValueError) as error:
        raise NotEmbedded(f"the file is not {kind}, or damaged ({plain(error)})") from error


def comments(data: bytes) -> list[str]:
    """The comments of a file, of the whole and of each stream. Raises ValueError for what is no video or sound."""
    try:
        with av.open(io.BytesIO(data)) as source:
            tags = [source.metadata, *(stream.metadata for stream in source.streams)]
    except (av.FFmpegError, OSError) as error:
        raise ValueError(plain(error)) from error
    return [value for one in tags for name, value in one.items() if name.lower() == _COMMENT]


def _copy(source: av.container.InputContainer, output: av.container.OutputContainer, text: str) -> None:
    streams = {stream.index: output.add_stream_from_template(stream) for stream in source.streams}
    output.metadata[_COMMENT] = text
    if output.format.name == "ogg":
        # its comments belong to the stream
        for stream in streams.values():
            stream.metadata[_COMMENT] = text
    for packet in source.demux():
        if packet.dts is not None:  # the empty one that ends a stream has none
            packet.stream = streams[packet.stream.index]
            output.mux(packet)
