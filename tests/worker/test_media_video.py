import io
import itertools
import shutil
import subprocess
from fractions import Fraction

import av
import numpy as np
import pytest

from omni_grpc.types.errors import FailedPrecondition, InternalError
from omni_grpc.types.media import VideoFormat
from omni_grpc.worker import media
from omni_grpc.worker.media.codec import require_encoder

RATES = [1, 8, 12.5, 23.976, 24000 / 1001, 24, 29.97, 60]
CODECS = {VideoFormat.MP4: "h264", VideoFormat.WEBM: "vp9", VideoFormat.FMP4: "h264"}


def film(frames=5, height=34, width=48):
    """Flat frames, each of a colour of its own: red falls, green rises."""
    video = np.full((frames, height, width, 3), 40, np.uint8)
    video[..., 0] = np.linspace(220, 60, frames)[:, None, None]
    video[..., 1] = np.linspace(20, 200, frames)[:, None, None]
    return video


def tone(seconds, rate=48000, channels=1):
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    return np.repeat(wave[None].astype(np.float32), channels, 0)


def read(data):
    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(stream)])
        return stream, frames, file.duration / av.time_base


def boxes(data):
    """The top-level boxes of an MP4, in order."""
    names, position = [], 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        names.append(data[position + 4 : position + 8].decode())
        position += size
    return names


@pytest.mark.parametrize("format", VideoFormat)
@pytest.mark.parametrize("fps", RATES)
def test_rate_count_and_duration_are_those_asked_for(format, fps):
    stream, frames, seconds = read(media.encode_video(film(), fps, format))
    assert stream.codec_context.name == CODECS[format]
    assert stream.average_rate == media.frame_rate(fps)
    assert float(stream.average_rate) == pytest.approx(fps, rel=1e-9)
    assert len(frames) == 5
    # Matroska counts in milliseconds
    assert seconds == pytest.approx(5 / fps, abs=1.1e-3 if format is VideoFormat.WEBM else 1e-5)


def test_the_rate_is_the_nearest_fraction():
    assert media.frame_rate(24) == 24
    assert media.frame_rate(12.5) == Fraction(25, 2)
    assert media.frame_rate(23.976) == Fraction(2997, 125)
    assert media.frame_rate(30000 / 1001) == Fraction(30000, 1001)
    for fps in (0, -1, float("nan"), float("inf"), 2000):
        with pytest.raises(InternalError, match="frames per second"):
            media.frame_rate(fps)


@pytest.mark.parametrize("format", VideoFormat)
def test_colours_come_back_as_they_were(format):
    _, frames, _ = read(media.encode_video(film(), 8, format))
    assert abs(frames[:, 2:-2, 2:-2].astype(int) - film()[:, 2:-2, 2:-2]).max() <= 4


@pytest.mark.parametrize("format", VideoFormat)
@pytest.mark.parametrize(("width", "height"), [(47, 33), (48, 33), (47, 34), (1, 1)])
def test_an_odd_size_is_what_encoded_size_says(format, width, height):
    stream, frames, _ = read(media.encode_video(film(2, height, width), 8, format))
    size = media.encoded_size(width, height, format)
    assert (stream.width, stream.height) == size
    assert frames.shape == (2, size[1], size[0], 3)
    odd = (width + width % 2, height + height % 2)
    assert size == ((width, height) if format is VideoFormat.WEBM else odd)
    # what was added repeats the edge
    assert abs(frames.astype(int) - film(2, size[1], size[0])).max() <= 4


@pytest.mark.parametrize("format", VideoFormat)
def test_one_frame_is_a_video(format):
    _, frames, seconds = read(media.encode_video(film(1), 8, format))
    assert len(frames) == 1
    assert seconds == pytest.approx(1 / 8, abs=1e-3)


@pytest.mark.parametrize("shape", [(0, 34, 48, 3), (2, 34, 48, 4), (34, 48, 3), (1, 2, 34, 48, 3), (2, 0, 48, 3)])
def test_frames_of_another_shape_are_refused(shape):
    with pytest.raises(InternalError) as caught:
        media.encode_video(np.zeros(shape, np.uint8), 8, VideoFormat.MP4)
    assert caught.value.reason == "BAD_OUTPUT"


def test_the_index_of_mp4_is_in_front_and_fmp4_is_in_fragments():
    plain = boxes(media.encode_video(film(), 8, VideoFormat.MP4))
    assert plain.index("moov") < plain.index("mdat")
    assert "moof" not in plain
    fragmented = boxes(media.encode_video(film(), 8, VideoFormat.FMP4))
    assert fragmented.index("moov") < fragmented.index("moof") < fragmented.index("mdat")


@pytest.mark.parametrize("format", VideoFormat)
def test_the_same_frames_give_the_same_bytes(format):
    noise = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    assert media.encode_video(noise, 24, format, (tone(0.2), 48000)) == media.encode_video(
        noise, 24, format, (tone(0.2), 48000)
    )


@pytest.mark.parametrize("format", VideoFormat)
@pytest.mark.parametrize(("rate", "channels"), [(48000, 2), (16000, 1)])
def test_sound_goes_with_the_video(format, rate, channels):
    data = media.encode_video(film(16), 8, format, (tone(2, rate, channels), rate))
    with av.open(io.BytesIO(data)) as file:
        sound = file.streams.audio[0]
        assert sound.codec_context.name == ("opus" if format is VideoFormat.WEBM else "aac")
        assert sound.channels == channels
        assert sound.rate == media.encoded_rate(format, rate) == (48000 if format is VideoFormat.WEBM else rate)
        parts = [frame.to_ndarray() for frame in file.decode(sound)]
        samples = np.concatenate(parts, axis=1)
    assert samples.shape[1] / sound.rate == pytest.approx(2, abs=0.1)
    middle = samples[0, sound.rate // 2 : sound.rate]
    assert np.abs(np.fft.rfft(middle)).argmax() == pytest.approx(440 * len(middle) / sound.rate, abs=1)
    _, frames, _ = read(data)
    assert len(frames) == 16


def test_streams_are_interleaved():
    """A player that reads from the front finds sound and picture of the same time close together."""
    data = media.encode_video(film(40), 8, VideoFormat.WEBM, (tone(5), 48000))
    with av.open(io.BytesIO(data)) as file:
        times = [float(packet.dts * packet.time_base) for packet in file.demux() if packet.dts is not None]
    assert max(before - after for before, after in itertools.pairwise(times)) < 0.2


def test_an_encoder_that_is_not_there_is_named():
    with pytest.raises(FailedPrecondition, match="no encoder 'h265-nobody-has'") as caught:
        require_encoder("h265-nobody-has")
    assert caught.value.reason == "CODEC_MISSING"
    assert require_encoder("libx264") == "libx264"


@pytest.mark.skipif(shutil.which("ffprobe") is None, reason="ffprobe is not installed")
@pytest.mark.parametrize("format", VideoFormat)
@pytest.mark.parametrize("fps", RATES)
def test_ffprobe_reads_the_same_rate_count_and_size(format, fps, tmp_path):
    path = tmp_path / "film"
    path.write_bytes(media.encode_video(film(7, 33, 47), fps, format))
    entries = "stream=width,height,r_frame_rate,nb_read_frames,color_space"
    command = ["ffprobe", "-v", "error", "-count_frames", "-show_entries", entries, "-of", "default=nw=1", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    found = dict(line.split("=") for line in done.stdout.split())
    assert (int(found["width"]), int(found["height"])) == media.encoded_size(47, 33, format)
    assert found["nb_read_frames"] == "7"
    assert found["color_space"] == "bt709"
    assert float(Fraction(found["r_frame_rate"])) == pytest.approx(fps, rel=1e-3)
