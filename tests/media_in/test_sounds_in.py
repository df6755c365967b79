import dataclasses

import numpy as np
import pytest

from omni_grpc.media_in import decode_audio
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.media import AudioFormat
from omni_grpc.worker import media
from tests.media_in.files import LIMITS, film, picture, recording, saved, tone

FIELD = "audio"


def decode(data, mime_type="", **changes):
    return decode_audio(data, mime_type, limits=dataclasses.replace(LIMITS, **changes), field=FIELD)


def samples(found):
    return np.frombuffer(found.data, "<f4").reshape(found.channels, -1)


def refused(data, mime_type="", *, reason, match=".", **changes):
    with pytest.raises(InvalidArgument, match=match) as caught:
        decode(data, mime_type, **changes)
    assert caught.value.reason == reason
    assert [violation.field for violation in caught.value.violations] == [FIELD]


@pytest.mark.parametrize("format", AudioFormat)
@pytest.mark.parametrize("channels", [1, 2])
def test_what_the_worker_writes_can_be_read(format, channels):
    sound = tone(0.5, 48000, channels)
    found, warnings = decode(media.encode_audio(sound, 48000, format), format.mime_type)
    assert (found.channels, found.sample_rate) == (channels, 48000)
    decoded = samples(found)
    assert decoded.shape[1] == pytest.approx(24000, abs=1500)
    if format in (AudioFormat.WAV, AudioFormat.FLAC):
        assert abs(decoded - sound).max() <= 0.5 / 32768
    peak = np.abs(np.fft.rfft(decoded[0][4800:19200])).argmax()
    assert peak == pytest.approx(440 * 14400 / 48000, abs=1)
    assert warnings == ()


@pytest.mark.parametrize(
    ("container", "codec", "mime_type"),
    [
        ("wav", "pcm_s24le", "audio/x-wav"),
        ("wav", "pcm_f32le", "audio/wave"),
        ("wav", "pcm_u8", "audio/wav"),
        ("mp4", "aac", "audio/mp4"),
        ("mp4", "alac", "audio/x-m4a"),
        ("ogg", "flac", "audio/ogg"),
    ],
)
def test_other_codecs_and_containers(container, codec, mime_type):
    found, warnings = decode(recording(tone(), container=container, codec=codec), mime_type)
    assert (found.channels, found.sample_rate) == (1, 16000)
    assert np.abs(samples(found)).max() == pytest.approx(0.5, abs=0.02)
    assert warnings == ()


def test_a_wave_file_from_a_pipe_does_not_know_its_length():
    data = bytearray(recording(tone()))
    place = data.index(b"data") + 4
    data[place : place + 4] = data[4:8] = b"\xff\xff\xff\xff"
    assert samples(decode(bytes(data))[0]).shape == (1, 8000)


def test_more_than_two_channels_are_mixed_down():
    sound = np.repeat(tone(), 6, 0) * 0.1
    found, warnings = decode(recording(sound))
    assert found.channels == 2
    assert [(w.code, w.message, w.requested) for w in warnings] == [
        ("INPUT_CONVERTED", "was downmixed to stereo", "6 channels")
    ]


def test_what_is_too_loud_is_clipped_with_a_warning():
    found, warnings = decode(recording(4 * tone(), codec="pcm_f32le"))
    assert np.abs(samples(found)).max() == 1
    clipped = np.count_nonzero(np.abs(4 * tone()) > 1)
    assert [w.message for w in warnings] == [f"{clipped} samples beyond full scale were clipped"]


def test_samples_that_are_not_finite_are_refused():
    sound = tone()
    sound[0, 100] = np.nan
    refused(recording(sound, codec="pcm_f32le"), reason="INPUT_UNREADABLE", match="NaN or infinite")


def test_the_sound_of_a_video_is_used_with_a_warning():
    found, warnings = decode(film(sound=True))
    assert samples(found).shape[1] == pytest.approx(24000, abs=2048)
    assert [w.message for w in warnings] == ["its video is not used"]


def test_seconds_have_a_limit():
    data = recording(tone(1.0))
    decode(data, max_seconds=1.0)
    refused(data, reason="INPUT_TOO_LARGE", match="1 s long; the maximum is 0.9 s", max_seconds=0.9)


def test_other_files_are_refused():
    refused(b"", reason="INPUT_EMPTY")
    refused(saved(picture(), "PNG"), reason="INPUT_UNREADABLE", match="image/png")
    refused(film(), reason="INPUT_UNREADABLE", match="no audio")
    refused(recording(tone()), "audio/flac", reason="INPUT_TYPE_MISMATCH", match="audio/wav")
    refused(recording(tone(), codec="pcm_mulaw"), reason="INPUT_NOT_SUPPORTED", match="pcm_mulaw")
    refused(recording(tone(rate=4000), rate=4000), reason="INPUT_NOT_SUPPORTED", match="a sampling rate of 4000 Hz")


@pytest.mark.parametrize("format", [AudioFormat.WAV, AudioFormat.FLAC, AudioFormat.MP3])
def test_a_truncated_image_is_refused(format):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 48000)).astype(np.float32)
    data = media.encode_audio(noise, 48000, format)
    refused(data[: len(data) // 2], reason="INPUT_UNREADABLE")
    refused(data[:20], reason="INPUT_UNREADABLE")
