import io

import av
import numpy as np
import pytest

from omni_grpc.types.errors import InternalError
from omni_grpc.types.media import AudioFormat
from omni_grpc.worker import media

CODECS = {
    AudioFormat.WAV: "pcm_s16le",
    AudioFormat.FLAC: "flac",
    AudioFormat.MP3: "mp3float",
    AudioFormat.OPUS: "opus",
}


def tone(seconds, rate, channels=1, hertz=440):
    wave = 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
    return np.stack([wave / (channel + 1) for channel in range(channels)]).astype(np.float32)


def read(data):
    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.audio[0]
        resampler = av.AudioResampler(format="fltp", layout=stream.layout.name, rate=stream.rate)
        frames = [part for frame in file.decode(stream) for part in resampler.resample(frame)]
        return stream.codec_context.name, stream.rate, np.concatenate([f.to_ndarray() for f in frames], axis=1)


@pytest.mark.parametrize("format", AudioFormat)
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [44100, 48000, 16000])
def test_length_rate_and_pitch_come_back(format, channels, rate):
    samples = tone(1.5, rate, channels)
    codec, found, decoded = read(media.encode_audio(samples, rate, format))
    assert codec == CODECS[format]
    assert found == media.encoded_rate(format, rate) == (48000 if format is AudioFormat.OPUS else rate)
    assert decoded.shape[0] == channels
    assert decoded.shape[1] / found == pytest.approx(1.5, abs=0.03)
    middle = decoded[:, found // 2 : found]
    assert np.abs(np.fft.rfft(middle[0])).argmax() == pytest.approx(220, abs=1)
    for channel in range(channels):
        assert np.abs(middle[channel]).max() == pytest.approx(0.5 / (channel + 1), abs=0.03)


@pytest.mark.parametrize("format", [AudioFormat.WAV, AudioFormat.FLAC])
def test_sixteen_bit_samples_come_back_bit_for_bit(format):
    values = np.random.default_rng(0).integers(-32768, 32768, (2, 5000))
    samples = (values / 32768).astype(np.float32)
    assert media.count_clipped(samples) == 0
    _, _, decoded = read(media.encode_audio(samples, 44100, format))
    assert np.array_equal(decoded * 32768, values)


def test_a_wave_file_is_plain_pcm():
    data = media.encode_audio(np.array([[0, 0.5, -1, 1]], np.float32), 8000, AudioFormat.WAV)
    assert data[:4] == b"RIFF"
    assert int.from_bytes(data[4:8], "little") == len(data) - 8
    assert np.frombuffer(data[-8:], "<i2").tolist() == [0, 16384, -32768, 32767]


@pytest.mark.parametrize("format", AudioFormat)
def test_what_is_too_loud_is_clipped_and_counted(format):
    samples = 3 * tone(0.5, 48000)
    assert media.count_clipped(samples) == np.count_nonzero(np.abs(samples) > 1) > 0
    _, _, decoded = read(media.encode_audio(samples, 48000, format))
    # a lossy codec overshoots the flat tops
    assert 0.95 <= np.abs(decoded).max() <= (1.0 if format in (AudioFormat.WAV, AudioFormat.FLAC) else 1.5)


@pytest.mark.parametrize("format", AudioFormat)
def test_it_is_resampled_to_the_rate_asked_for(format):
    _, rate, decoded = read(media.encode_audio(tone(1, 44100), 44100, format, 24000))
    assert rate == (48000 if format is AudioFormat.OPUS else 24000)
    assert decoded.shape[1] == pytest.approx(rate, abs=rate * 0.03)
    half = decoded[0, rate // 4 : 3 * rate // 4]
    assert np.abs(np.fft.rfft(half)).argmax() == pytest.approx(220, abs=1)


@pytest.mark.parametrize(
    ("format", "rate", "expected"),
    [
        (AudioFormat.MP3, 44100, 44100),
        (AudioFormat.MP3, 22051, 24000),
        (AudioFormat.MP3, 192000, 48000),
        (AudioFormat.OPUS, 16000, 48000),
        (AudioFormat.WAV, 22051, 22051),
        (AudioFormat.FLAC, 96000, 96000),
    ],
)
def test_a_rate_that_the_format_lacks_becomes_the_next_one(format, rate, expected):
    assert media.encoded_rate(format, rate) == expected
    _, found, _ = read(media.encode_audio(tone(0.2, rate), rate, format))
    assert found == expected


@pytest.mark.parametrize("format", AudioFormat)
def test_the_same_samples_give_the_same_bytes(format):
    samples = tone(0.3, 44100, 2)
    assert media.encode_audio(samples, 44100, format, 32000) == media.encode_audio(samples, 44100, format, 32000)


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros((1, 0), np.float32),
        np.zeros((3, 10), np.float32),
        np.zeros(10, np.float32),
        np.full((1, 10), np.nan, np.float32),
        np.full((1, 10), np.inf, np.float32),
    ],
    ids=["empty", "three channels", "one dimension", "nan", "inf"],
)
def test_what_no_file_can_hold_is_refused(samples):
    with pytest.raises(InternalError) as caught:
        media.encode_audio(samples, 44100, AudioFormat.WAV)
    assert caught.value.reason == "BAD_OUTPUT"


def test_one_sample_is_a_sound():
    _, rate, decoded = read(media.encode_audio(np.array([[0.25]], np.float32), 44100, AudioFormat.WAV))
    assert (rate, decoded.tolist()) == (44100, [[0.25]])
