"""Opens container files with only the demuxers and decoders named here enabled."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping

import av

from omni_grpc.media_in.limits import MediaLimits
from omni_grpc.media_in.refusal import TOO_LARGE, UNSUPPORTED, faults_of, refusal
from omni_grpc.media_in.source import checked_kind

_DEMUXERS: Mapping[str, str] = {
    "video/mp4": "mov",
    "video/webm": "matroska",
    "audio/wav": "wav",
    "audio/flac": "flac",
    "audio/mpeg": "mp3",
    "audio/ogg": "ogg",
}
KINDS = tuple(_DEMUXERS)

VIDEO_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")
_PCM = ("pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le")
AUDIO_CODECS = ("aac", "alac", "flac", "mp3", "opus", "vorbis", *_PCM)
# the decoders that a codec may be opened with
_DECODERS = (*VIDEO_CODECS, *AUDIO_CODECS, "libvpx", "libvpx-vp9", "libdav1d", "libaom-av1", "mp3float", "libopus")


@contextlib.contextmanager
def opened(
    data: bytes, mime_type: str, kinds: tuple[str, ...], limits: MediaLimits, field: str
) -> Iterator[av.container.InputContainer]:
    """The opened `data`. Errors of the library inside the block count as the input's fault: InvalidArgument."""
    kind = checked_kind(data, mime_type, kinds, limits, field)
    options = {
        "codec_whitelist": ",".join(_DECODERS),
        # the library pads sizes to whole blocks, hence twice; the exact limit is checked frame by frame
        "max_pixels": str(2 * limits.max_pixels + 4096),
        "probesize": str(5 << 20),
        "analyzeduration": "5000000",
    }
    with (
        faults_of(field, kind),
        av.open(io.BytesIO(data), "r", format=_DEMUXERS[kind], options=options, metadata_errors="replace") as file,
    ):
        yield file


def check_codec(stream: av.VideoStream | av.AudioStream, accepted: tuple[str, ...], field: str) -> None:
    codec = stream.codec_context
    name = codec.codec.canonical_name if codec else "an unknown codec"
    if name not in accepted:
        raise refusal(field, UNSUPPORTED, f"uses the codec {name}; send one of {', '.join(accepted)}")


def seconds_of(stream: av.VideoStream | av.AudioStream) -> float | None:
    """The stream's duration in seconds, as it states it."""
    if stream.duration is None or stream.time_base is None:
        return None
    return float(stream.duration * stream.time_base)


def check_seconds(seconds: float | None, limits: MediaLimits, field: str) -> None:
    if seconds is not None and seconds > limits.max_seconds:
        raise refusal(field, TOO_LARGE, f"is {seconds:g} s long; the maximum is {limits.max_seconds:g} s; shorten it")
