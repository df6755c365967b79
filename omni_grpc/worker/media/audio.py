"""Sound as files, and as the second stream of a video."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any, TypeAlias

import av
import numpy as np
import numpy.typing as npt

from omni_grpc.types.media import AudioFormat, VideoFormat
from omni_grpc.worker.media.codec import bad_output, require_encoder

Samples = npt.NDArray[np.float32]
"""Channels x samples in -1..1."""

Packets: TypeAlias = "list[av.Packet[Any]]"
"""Of one stream or several, each with its time base."""

_LAYOUTS: Mapping[int, str] = {1: "mono", 2: "stereo"}


@dataclasses.dataclass(frozen=True, slots=True)
class Coding:
    """How sound is written: the encoder, the samples it takes, its bit rate (0: it has none) and the rates it knows
    (empty: any).
    """

    codec: str
    sample_format: str
    bit_rate: int = 0
    rates: tuple[int, ...] = ()


AAC = Coding(
    "aac",
    "fltp",
    192_000,
    (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 64_000, 88_200, 96_000),
)
# Opus knows lower rates, but a decoder plays all of them at 48 kHz: one rate means that the reply says what a player
# says
OPUS = Coding("libopus", "flt", 128_000, (48_000,))

_FILES: Mapping[AudioFormat, tuple[str, Coding]] = {
    AudioFormat.WAV: ("wav", Coding("pcm_s16le", "s16")),
    AudioFormat.FLAC: ("flac", Coding("flac", "s16")),
    AudioFormat.MP3: (
        "mp3",
        Coding("libmp3lame", "fltp", 192_000, (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)),
    ),
    AudioFormat.OPUS: ("ogg", OPUS),
}

OF_VIDEO: Mapping[VideoFormat, Coding] = {VideoFormat.MP4: AAC, VideoFormat.WEBM: OPUS, VideoFormat.FMP4: AAC}


def encode_audio(samples: Samples, sample_rate: int, format: AudioFormat, target_rate: int | None = None) -> bytes:
    """The sound as a file: 16 bits per sample in WAV and FLAC, 192 kbit/s in MP3, 128 kbit/s in Opus.

    It is resampled to `target_rate` (Hz), and then to a rate that the format has: `encoded_rate` says which. What is
    beyond -1..1 is clipped: `count_clipped` says how much. The same samples give the same bytes.

    Raises InternalError (BAD_OUTPUT) for no samples, more than two channels or samples that are not finite, and
    FailedPrecondition (CODEC_MISSING).
    """
    container, coding = _FILES[format]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options={"fflags": "+bitexact"}) as output:
        for packet in audio_packets(output, samples, sample_rate, coding, target_rate):
            output.mux(packet)
    return buffer.getvalue()


def encoded_rate(format: AudioFormat | VideoFormat, rate: int) -> int:
    """The rate (Hz) of the sound in a file of this format, for sound of `rate`: the same where the format has it, else
    the next higher one that it has, else its highest.
    """
    coding = OF_VIDEO[format] if isinstance(format, VideoFormat) else _FILES[format][1]
    return _nearest_rate(coding, rate)


def count_clipped(samples: Samples) -> int:
    """How many samples, over all channels, lie outside of -1..1."""
    return int(np.count_nonzero(np.abs(samples) > 1))


def audio_packets(
    output: av.container.OutputContainer,
    samples: Samples,
    sample_rate: int,
    coding: Coding,
    target_rate: int | None = None,
) -> Packets:
    """Adds a stream to `output` and encodes the samples for it."""
    _check(samples)
    rate = _nearest_rate(coding, target_rate or sample_rate)
    samples = np.clip(_resampled(np.clip(samples, -1, 1), sample_rate, rate), -1, 1)
    layout = _LAYOUTS[len(samples)]
    stream = output.add_stream(require_encoder(coding.codec), rate=rate, layout=layout, format=coding.sample_format)
    assert isinstance(stream, av.AudioStream)
    if coding.bit_rate:
        stream.bit_rate = coding.bit_rate
    return [*stream.encode(_frame(samples, coding.sample_format, layout, rate)), *stream.encode(None)]


def _nearest_rate(coding: Coding, rate: int) -> int:
    if not coding.rates or rate in coding.rates:
        return rate
    return min((known for known in coding.rates if known > rate), default=coding.rates[-1])


def _check(samples: Samples) -> None:
    if samples.ndim != 2 or len(samples) not in _LAYOUTS or not samples.shape[1]:
        raise bad_output(f"sound of shape {samples.shape}: it takes 1 or 2 channels x at least 1 sample")
    if not np.isfinite(samples).all():
        raise bad_output("the sound has samples that are not finite")


def _resampled(samples: Samples, rate: int, target: int) -> Samples:
    if rate == target:
        return samples
    layout = _LAYOUTS[len(samples)]
    resampler = av.AudioResampler(format="fltp", layout=layout, rate=target)
    frames = [*resampler.resample(_frame(samples, "fltp", layout, rate)), *resampler.resample(None)]
    return np.concatenate([frame.to_ndarray() for frame in frames], axis=1)


def _frame(samples: Samples, format: str, layout: str, rate: int) -> av.AudioFrame:
    if format == "s16":
        # the scale that decoders divide by, so that 16-bit sound comes back bit for bit
        samples = np.clip(np.rint(samples * 32768), -32768, 32767).astype(np.int16)
    packed = samples if format.endswith("p") else samples.T.reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(packed), format=format, layout=layout)
    frame.sample_rate = rate
    frame.pts = 0
    return frame
