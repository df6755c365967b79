"""Videos as frames."""

from __future__ import annotations

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

_HD_HEIGHT = 720
"""From this height on, a video that does not name its matrix is taken to be BT.709, below it BT.601, as players do."""


def decode_video(data: bytes, mime_type: str = "", *, limits: MediaLimits, field: str) -> tuple[VideoInput, Warnings]:
    """Every frame of the first video stream as 8-bit RGB, upright, in the order of display, and what was converted.

    `fps` is the average rate of the file; frames are neither dropped nor doubled to make their distances equal. Raises
    InvalidArgument, with `field` as its path, for what is no MP4 or WebM, is cut off, holds no video of a codec in
    VIDEO_CODECS, is larger than the limits, or is not what `mime_type` says.
    """
    with opened(data, mime_type, _KINDS, limits, field) as file:
        if not file.streams.video:
            raise refusal(field, UNREADABLE, "contains no video, or is truncated before it")
        stream = file.streams.video[0]
        check_codec(stream, VIDEO_CODECS, field)
        check_seconds(seconds_of(stream), limits, field)
        _check_size(stream.width, stream.height, max(1, stream.frames), limits, field)
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        if not 0.01 <= fps <= 1000:
            raise refusal(field, UNSUPPORTED, f"has a frame rate of {fps:g}; supported are 0.01 to 1000 fps")
        pictures, turn = _pictures(file, stream, limits, field)
        warnings: list[RequestWarning] = []
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
) -> tuple[list[npt.NDArray[np.uint8]], int]:
    """Height x width x 3 of every frame, and by how many degrees they were turned."""
    pictures: list[npt.NDArray[np.uint8]] = []
    turn = 0
    for frame in file.decode(stream):
        if frame.is_corrupt:
            raise refusal(field, UNREADABLE, f"has a corrupted frame, number {len(pictures) + 1}")
        _check_size(frame.width, frame.height, len(pictures) + 1, limits, field)
        turn = frame.rotation if frame.rotation % 90 == 0 else 0
        pictures.append(np.rot90(_rgb(frame), turn // 90))
        if pictures[-1].shape != pictures[0].shape:
            raise refusal(field, UNSUPPORTED, f"changes its size at frame {len(pictures)}; send a video of one size")
    if not pictures or len(pictures) < stream.frames:
        raise refusal(field, UNREADABLE, f"is truncated: it has {len(pictures)} of {stream.frames or 'its'} frames")
    return pictures, turn


def _rgb(frame: av.VideoFrame) -> npt.NDArray[np.uint8]:
    untagged = Colorspace.ITU709 if frame.height >= _HD_HEIGHT else Colorspace.ITU601
    matrix = untagged if frame.colorspace == _UNSPECIFIED else None
    return frame.reformat(format="rgb24", src_colorspace=matrix).to_ndarray().astype(np.uint8, copy=False)


def _check_size(width: int, height: int, num_frames: int, limits: MediaLimits, field: str) -> None:
    if width * height > limits.max_pixels:
        raise refusal(field, TOO_LARGE, f"is {width} x {height}; the maximum is {limits.max_pixels} pixels per frame")
    if num_frames > limits.max_frames:
        raise refusal(field, TOO_LARGE, f"has {num_frames} frames or more; the maximum is {limits.max_frames}")
    if num_frames * width * height > limits.max_video_pixels:
        raise refusal(
            field,
            TOO_LARGE,
            f"has {num_frames} frames or more of {width} x {height}; the maximum is {limits.max_video_pixels} pixels "
            "over all frames",
        )
