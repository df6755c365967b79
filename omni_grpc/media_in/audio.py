"""Decodes audio to samples."""

from __future__ import annotations

import itertools

import av
import numpy as np
import numpy.typing as npt

from omni_grpc.media_in.container import AUDIO_CODECS, KINDS, check_codec, check_seconds, opened, seconds_of
from omni_grpc.media_in.limits import MediaLimits
from omni_grpc.media_in.refusal import UNREADABLE, UNSUPPORTED, Warnings, converted, refusal
from omni_grpc.types.media import AudioInput
from omni_grpc.types.results import RequestWarning

MIN_RATE, MAX_RATE = 8_000, 192_000
_SLACK = 0.1
"""Seconds that a file may be shorter than it says: lossy codecs count in whole packets."""


def decode_audio(data: bytes, mime_type: str = "", *, limits: MediaLimits, field: str) -> tuple[AudioInput, Warnings]:
    """The first audio stream at its own rate, mono or stereo, and how it was converted.

    Raises InvalidArgument, with `field` as its path, if the file is not WAV, FLAC, MP3, Ogg, MP4 or WebM, is cut off,
    has no audio of a codec in AUDIO_CODECS, exceeds the limits, or is not what `mime_type` says.
    """
    _check_whole(data, field)
    with opened(data, mime_type, KINDS, limits, field) as file:
        if not file.streams.audio:
            raise refusal(field, UNREADABLE, "contains no audio, or is truncated before it; send a file with sound")
        stream = file.streams.audio[0]
        check_codec(stream, AUDIO_CODECS, field)
        announced = seconds_of(stream)
        check_seconds(announced, limits, field)
        rate, channels = stream.rate, stream.channels
        if not MIN_RATE <= rate <= MAX_RATE:
            raise refusal(
                field,
                UNSUPPORTED,
                f"has a sampling rate of {rate} Hz; supported are {MIN_RATE} to {MAX_RATE} Hz; resample it",
            )
        samples = _samples(file, stream, limits, field)
        warnings: list[RequestWarning] = []
        if any(video.codec_context.name not in _COVERS for video in file.streams.video):
            warnings.append(converted(field, "its video is not used", "video and audio", "sound"))
        seconds = samples.shape[1] / rate
        if announced is not None and seconds < announced - _SLACK:
            raise refusal(field, UNREADABLE, f"is truncated: it has {seconds:.3f} of {announced:.3f} s; send it whole")
    if channels > 2:
        warnings.append(converted(field, "was downmixed to stereo", f"{channels} channels", "2"))
    if clipped := int(np.count_nonzero(np.abs(samples) > 1)):
        warnings.append(converted(field, f"{clipped} samples beyond full scale were clipped"))
        samples = np.clip(samples, -1, 1)
    return AudioInput(len(samples), rate, samples.astype("<f4", copy=False).tobytes()), tuple(warnings)


def _check_whole(data: bytes, field: str) -> None:
    """A WAV says how long it is, which the library does not hold it to; one from a pipe says 0 or all ones."""
    announced = int.from_bytes(data[4:8], "little")
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE" and announced not in (0, 0xFFFFFFFF) and len(data) < announced + 8:
        raise refusal(
            field,
            UNREADABLE,
            f"is truncated: it has {len(data)} of {announced + 8} bytes; send it whole (it is audio/wav)",
        )


_COVERS = ("mjpeg", "png")
"""Streams of a music file that are its cover, not a video."""


def _samples(
    file: av.container.InputContainer, stream: av.AudioStream, limits: MediaLimits, field: str
) -> npt.NDArray[np.float32]:
    """Channels x samples."""
    resampler = av.AudioResampler(format="fltp", layout="mono" if stream.channels == 1 else "stereo", rate=stream.rate)
    parts: list[npt.NDArray[np.float32]] = []
    count = 0
    for frame in itertools.chain(file.decode(stream), (None,)):
        if frame is not None and frame.is_corrupt:
            raise refusal(field, UNREADABLE, f"has corrupted data after {count / stream.rate:.3f} s; send it again")
        for part in resampler.resample(frame):
            parts.append(part.to_ndarray().astype(np.float32, copy=False))
            count += part.samples
        check_seconds(count / stream.rate, limits, field)
    if not count:
        raise refusal(field, UNREADABLE, "contains no samples; send a longer sound")
    samples = np.concatenate(parts, axis=1)
    if not np.isfinite(samples).all():
        raise refusal(field, UNREADABLE, "has samples that are NaN or infinite; remove them")
    return samples
