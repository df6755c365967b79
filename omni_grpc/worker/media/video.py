"""Videos as files."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

from omni_grpc.types.errors import ResourceExhausted
from omni_grpc.types.media import VideoFormat
from omni_grpc.types.os_errors import FULL, reason
from omni_grpc.worker.media.audio import OF_VIDEO, Packets, Samples, audio_packets
from omni_grpc.worker.media.codec import bad_output, require_encoder

Frames = npt.NDArray[np.uint8]
"""Frames x height x width x 3, RGB."""


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    """`multiple` is what width and height must be divisible by."""

    container: str
    codec: str
    multiple: int
    muxing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    coding: Mapping[str, str] = dataclasses.field(default_factory=dict)


# The number of threads is part of what an encoder decides: a fixed one keeps the bytes from following the cores.
# x264's macroblock tree is off, because with it the same small video now and then gives other bytes.
_X264: Mapping[str, str] = {"preset": "veryfast", "crf": "18", "threads": "4", "x264-params": "mbtree=0"}
_VP9: Mapping[str, str] = {"crf": "24", "b": "0", "deadline": "good", "cpu-used": "4", "row-mt": "1", "threads": "4"}

_FILES: Mapping[VideoFormat, _File] = {
    VideoFormat.MP4: _File("mp4", "libx264", 2, {"movflags": "faststart"}, _X264),
    VideoFormat.WEBM: _File("webm", "libvpx-vp9", 1, {}, _VP9),
    VideoFormat.FMP4: _File("mp4", "libx264", 2, {"movflags": "frag_keyframe+delay_moov+default_base_moof"}, _X264),
}


def encode_video(frames: Frames, fps: float, format: VideoFormat, audio: tuple[Samples, int] | None = None) -> bytes:
    """The frames as a file, 8 bits 4:2:0 in BT.709, at exactly `frame_rate(fps)`; `audio` is samples and their rate.

    Both streams start at 0 and are as long as they are: none is cut or stretched to the other. Where `encoded_size` is
    larger than the frames, their last column and row are repeated. The same frames give the same bytes.

    Raises InternalError (BAD_OUTPUT) for no frames, FailedPrecondition (CODEC_MISSING) and what `encode_audio` does.
    """
    file = _FILES[format]
    if frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
        raise bad_output(f"a video of shape {frames.shape}: it takes at least 1 frame x height x width x 3")
    # a file with a name, since the muxer reads it again to move the index to its front
    with _room_for(), tempfile.NamedTemporaryFile(suffix=f".{file.container}") as target:
        options = {"fflags": "+bitexact", **file.muxing}
        with av.open(target.name, "w", format=file.container, options=options) as output:
            packets = _video_packets(output, _padded(frames, file.multiple), frame_rate(fps), file)
            if audio is not None:
                packets += audio_packets(output, *audio, OF_VIDEO[format])
            for packet in sorted(packets, key=_decode_time):
                output.mux(packet)
        return Path(target.name).read_bytes()


@contextlib.contextmanager
def _room_for() -> Iterator[None]:
    """Raises ResourceExhausted (DISK_FULL) for the temporary file that has no room, and names its folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        folder = tempfile.gettempdir()
        message = f"{reason(error)} in {folder}, where the server makes its videos; free some, or set TMPDIR"
        raise ResourceExhausted(message, reason="DISK_FULL") from error


def encoded_size(width: int, height: int, format: VideoFormat) -> tuple[int, int]:
    """Width and height of the encoded video: H.264 rounds odd ones up to even, VP9 takes all."""
    multiple = _FILES[format].multiple
    return width + -width % multiple, height + -height % multiple


def frame_rate(fps: float) -> Fraction:
    """The nearest fraction with a denominator up to 1001: 12.5 is 25/2, 24000 / 1001 is itself, 23.976 is 2997/125."""
    if not 0.01 <= fps <= 1000:
        raise bad_output(f"{fps:g} frames per second: a file takes 0.01 to 1000")
    return Fraction(fps).limit_denominator(1001)


def _video_packets(output: av.container.OutputContainer, frames: Frames, rate: Fraction, file: _File) -> Packets:
    _, height, width, _ = frames.shape
    stream = output.add_stream(require_encoder(file.codec), rate=rate, options=dict(file.coding))
    assert isinstance(stream, av.VideoStream)
    stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
    context = stream.codec_context
    context.time_base = 1 / rate
    # the enums of PyAV name the matrix ITU709 and the rest BT709; without them players guess from the size
    context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
    context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
    packets: Packets = []
    for index, picture in enumerate(frames):
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24").reformat(
            format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
        )
        frame.pts, frame.time_base, frame.duration = index, 1 / rate, 1
        packets += stream.encode(frame)
    return packets + stream.encode(None)


def _padded(frames: Frames, multiple: int) -> Frames:
    _, height, width, _ = frames.shape
    missing = (-height % multiple, -width % multiple)
    if not any(missing):
        return frames
    return np.pad(frames, ((0, 0), (0, missing[0]), (0, missing[1]), (0, 0)), mode="edge")


def _decode_time(packet: av.Packet[Any]) -> Fraction:
    # encoders set both
    assert packet.dts is not None
    assert packet.time_base is not None
    return packet.dts * packet.time_base
