"""Decodes videos to frames."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import Colorspace

from omni_grpc.media_in.container import VIDEO_CODECS, check_codec, check_seconds, opened, seconds_of
from omni_grpc.media_in.limits import MediaLimits
from omni_grpc.media_in.refusal import TOO_LARGE, UNREADABLE, UNSUPPORTED, Warnings, converted, refusal
from omni_grpc.types.media import VideoInput
from omni_grpc.types.results import RequestWarning

_KINDS = ("video/mp4", "video/webm")
_UNSPECIFIED = 2
"""AVCOL_SPC_UNSPECIFIED, which PyAV does not name."""

_JITTER = 0.1
"""Share of a frame's time by which cameras miss an even beat."""

_HD_HEIGHT = 720
"""From this height on, a video that does not name its matrix is taken to be BT.709, below it BT.601, as players do."""


def decode_video(data: bytes, mime_type: str = "", *, limits: MediaLimits, field: str) -> tuple[VideoInput, Warnings]:
    """Every frame of the first video stream as 8-bit RGB, upright, in display order, and how it was converted.

    `fps` is what the times of the frames say; frames are neither dropped nor doubled to make their distances equal.
    Raises InvalidArgument, with `field` as its path, for what is no MP4 or WebM, is cut off, holds no video of a codec
    in VIDEO_CODECS, is larger than the limits, or is not what `mime_type` says.
    """
    with opened(data, mime_type, _KINDS, limits, field) as file:
        if not file.streams.video:
            raise refusal(field, UNREADABLE, "contains no video, or is truncated before it; send a file with one")
        stream = file.streams.video[0]
        check_codec(stream, VIDEO_CODECS, field)
        check_seconds(seconds_of(stream), limits, field)
        _check_size(stream.width, stream.height, max(1, stream.frames), limits, field)
        pictures, times, turn = _pictures(file, stream, limits, field)
        fps, even = _rate(times, stream)
        if not 0.01 <= fps <= 1000:
            raise refusal(
                field, UNSUPPORTED, f"has a frame rate of {fps:g}; supported are 0.01 to 1000 fps; encode it again"
            )
        warnings: list[RequestWarning] = []
        if not even:
            message = "its frames have unequal distances in time, and are used with equal ones"
            gaps = [after - before for before, after in itertools.pairwise(times)]
            found = f"{min(gaps):.4g} to {max(gaps):.4g} s from frame to frame"
            warnings.append(converted(field, message, found, f"{fps:.4g} frames per second"))
        if file.streams.audio:
            warnings.append(converted(field, "its audio is not used", "video and audio", "video"))
        if turn:
            warnings.append(
                converted(field, "was rotated upright according to its header", f"rotated by {turn} degrees", "0")
            )
    height, width, _ = pictures[0].shape
    # joined from views: a second copy of a long video is a lot, a third is too much
    data = b"".join(np.ascontiguousarray(picture).data for picture in pictures)
    return VideoInput(width, height, len(pictures), fps, data), tuple(warnings)


def _pictures(
    file: av.container.InputContainer, stream: av.VideoStream, limits: MediaLimits, field: str
) -> tuple[list[npt.NDArray[np.uint8]], list[float], int]:
    """Height x width x 3 of every frame, its time in seconds where each has one, and by how many degrees they were
    turned.
    """
    pictures: list[npt.NDArray[np.uint8]] = []
    times: list[float | None] = []
    turn = 0
    for frame in file.decode(stream):
        if frame.is_corrupt:
            raise refusal(field, UNREADABLE, f"has a corrupted frame, number {len(pictures) + 1}; send it again")
        _check_size(frame.width, frame.height, len(pictures) + 1, limits, field)
        turn = frame.rotation if frame.rotation % 90 == 0 else 0
        times.append(frame.time)
        pictures.append(np.rot90(_rgb(frame), turn // 90))
        if pictures[-1].shape != pictures[0].shape:
            raise refusal(field, UNSUPPORTED, f"changes its size at frame {len(pictures)}; send a video of one size")
    if not pictures or len(pictures) < stream.frames:
        raise refusal(
            field,
            UNREADABLE,
            f"is truncated: it has {len(pictures)} of {stream.frames or 'its'} frames; send it whole",
        )
    known = [time for time in times if time is not None]
    return pictures, known if len(known) == len(times) else [], turn


def _rate(times: Sequence[float], stream: av.VideoStream) -> tuple[float, bool]:
    """Frames per second, and whether the frames have equal distances.

    What the file declares is exact where the times agree with it, which they do up to their rounding; for unequal
    distances it is an estimate of the library, from the first packets.
    """
    declared = float(stream.average_rate or stream.guessed_rate or 0)
    count = len(times)
    if count < 2 or times[-1] <= times[0]:
        return declared, True
    tick = 1.001 * float(stream.time_base or 0)
    if declared and _furthest(times, 1 / declared) <= tick:
        return declared, True
    mean = (times[-1] - times[0]) / (count - 1)
    if _furthest(times, mean) <= max(tick, _JITTER * mean):
        return 1 / mean, True
    return count / (times[-1] - times[0] + _last_distance(times, stream)), False


def _furthest(times: Sequence[float], distance: float) -> float:
    """By how many seconds a frame is off, at most, if all have this distance from one another."""
    return max(abs(time - times[0] - i * distance) for i, time in enumerate(times))


def _last_distance(times: Sequence[float], stream: av.VideoStream) -> float:
    """How long the last frame is shown: what is left of the stream where that is believable, else the usual time."""
    gaps = [after - before for before, after in itertools.pairwise(times)]
    if stream.duration is not None and stream.time_base is not None:
        rest = float(((stream.start_time or 0) + stream.duration) * stream.time_base) - times[-1]
        if 0 < rest <= max(gaps):
            return rest
    return statistics.median(gaps)


def _rgb(frame: av.VideoFrame) -> npt.NDArray[np.uint8]:
    untagged = Colorspace.ITU709 if frame.height >= _HD_HEIGHT else Colorspace.ITU601
    matrix = untagged if frame.colorspace == _UNSPECIFIED else None
    return frame.reformat(format="rgb24", src_colorspace=matrix).to_ndarray().astype(np.uint8, copy=False)


def _check_size(width: int, height: int, num_frames: int, limits: MediaLimits, field: str) -> None:
    if width * height > limits.max_pixels:
        raise refusal(
            field,
            TOO_LARGE,
            f"is {width} x {height}; the maximum is {limits.max_pixels} pixels per frame; scale it down",
        )
    if num_frames > limits.max_frames:
        raise refusal(field, TOO_LARGE, f"has {num_frames} frames or more; the maximum is {limits.max_frames}; cut it")
    if num_frames * width * height > limits.max_video_pixels:
        raise refusal(
            field,
            TOO_LARGE,
            f"has {num_frames} frames or more of {width} x {height}; the maximum is {limits.max_video_pixels} pixels "
            "over all frames; cut it or scale it down",
        )
