import dataclasses
import io
import itertools
import struct
from fractions import Fraction

import av
import numpy as np
import pytest

from omni_grpc.media_in import decode_video
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.media import VideoFormat
from omni_grpc.worker import media
from tests.media_in.files import LIMITS, film, saved
from tests.media_in.files import picture as still

FIELD = "source_video"


def decode(data, mime_type="", **changes):
    return decode_video(data, mime_type, limits=dataclasses.replace(LIMITS, **changes), field=FIELD)


def frames(found):
    return np.frombuffer(found.data, np.uint8).reshape(found.num_frames, found.height, found.width, 3)


def refused(data, mime_type="", *, reason, match=".", **changes):
    with pytest.raises(InvalidArgument, match=match) as caught:
        decode(data, mime_type, **changes)
    assert caught.value.reason == reason
    assert [violation.field for violation in caught.value.violations] == [FIELD]


@pytest.mark.parametrize("format", VideoFormat)
@pytest.mark.parametrize("fps", [8, 12.5, 24000 / 1001])
def test_what_the_worker_writes_can_be_read(format, fps):
    video = np.full((5, 34, 46, 3), 60, np.uint8)
    video[..., 0] = np.linspace(20, 220, 5)[:, None, None]
    found, warnings = decode(media.encode_video(video, fps, format), format.mime_type)
    assert (found.num_frames, found.height, found.width) == (5, 34, 46)
    assert found.fps == pytest.approx(fps, rel=1e-9)
    assert abs(frames(found).astype(int) - video).max() <= 4
    assert warnings == ()


@pytest.mark.parametrize(
    ("container", "codec", "mime_type"),
    [
        ("mp4", "mpeg4", "video/mp4"),
        ("mov", "libx264", "video/quicktime"),
        ("webm", "libvpx", "video/webm"),
        ("matroska", "libx264", "video/x-matroska"),
    ],
)
def test_other_codecs_and_containers(container, codec, mime_type):
    found, warnings = decode(film(container=container, codec=codec), mime_type)
    assert (found.num_frames, found.height, found.width, found.fps) == (4, 32, 48, 8)
    # untagged and small: BT.601, in which grey is grey
    assert abs(frames(found)[:, 8, 8, 1].astype(int) - np.linspace(40, 200, 4)).max() <= 4
    assert warnings == ()


def test_its_sound_is_not_used_and_a_warning_says_so():
    _, warnings = decode(film(sound=True))
    assert [(w.code, w.field, w.message) for w in warnings] == [("INPUT_CONVERTED", FIELD, "its audio is not used")]


@pytest.mark.parametrize(
    ("matrix", "turns"),
    [((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)],
    ids=["90 clockwise", "180", "90 counterclockwise"],
)
def test_it_is_turned_upright(matrix, turns):
    video = np.zeros((2, 32, 48, 3), np.uint8)
    video[:, :8, :8] = 255  # a white corner, top left
    data = bytearray(media.encode_video(video, 8, VideoFormat.MP4))
    # the matrix of the track's header: a b u c d v x y w, fixed point
    start = data.index(b"tkhd") + 4 + 4 + 20 + 8 + 8
    a, b, c, d = (value << 16 for value in matrix)
    data[start : start + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    found, warnings = decode(bytes(data))
    expected = np.rot90(video[0], turns)
    assert frames(found)[0].shape == expected.shape
    assert abs(frames(found)[0].astype(int) - expected).mean() < 3
    assert [w.message for w in warnings] == ["was rotated upright according to its header"]


def timed(times, container="mp4", codec="libx264", bframes=0):
    """A video whose frames are shown at these milliseconds; the last of them is the end."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        if codec == "libx264":
            stream.options = {"bf": str(bframes)}
        for i, (time, after) in enumerate(itertools.pairwise(times)):
            frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 40 + 7 * i, np.uint8), format="rgb24")
            frame.pts, frame.time_base, frame.duration = time, Fraction(1, 1000), after - time
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


UNEVEN = {
    "slow then fast": (0, 250, 500, 750, 1000, 1020, 1040, 1060, 1080, 1120),
    "fast then slow": (0, 20, 40, 60, 80, 330, 580, 830, 1080, 1120),
    "a frame that is missing": (0, 40, 80, 120, 200, 240, 280, 320),
    "a pause": (0, 40, 80, 2000, 2040, 2080),
}


@pytest.mark.parametrize(("name", "bframes"), [*((name, 0) for name in UNEVEN), ("slow then fast", 2), ("a pause", 2)])
def test_the_rate_is_what_the_times_of_the_frames_say(name, bframes):
    """The last frame of each is shown for 40 ms, which is all that this muxer writes of it."""
    times = UNEVEN[name]
    found, warnings = decode(timed(times, bframes=bframes))
    assert found.num_frames == len(times) - 1
    assert found.fps == pytest.approx((len(times) - 1) * 1000 / times[-1], rel=1e-3)
    (warning,) = warnings
    assert (warning.field, warning.message) == (
        FIELD,
        "its frames have unequal distances in time, and are used with equal ones",
    )
    gaps = np.diff(times[:-1]) / 1000
    assert warning.requested == f"{gaps.min():.4g} to {gaps.max():.4g} s from frame to frame"
    assert warning.applied == f"{found.fps:.4g} frames per second"


def test_the_rate_of_a_webm_with_unequal_distances():
    """It does not say how long its last frame is shown: as long as the others on average."""
    found, warnings = decode(timed(UNEVEN["slow then fast"], "webm", "libvpx"))
    assert found.fps == pytest.approx(8 / 1.08, rel=1e-3)
    assert len(warnings) == 1


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_equal_distances_that_are_not_the_declared_ones_and_jitter_bring_no_warning(container):
    codec = "libx264" if container == "mp4" else "libvpx"
    found, warnings = decode(timed(range(0, 1300, 130), container, codec))
    assert (found.fps, warnings) == (pytest.approx(1000 / 130), ())
    shaken = [time + (2 if i % 3 == 1 else 0) for i, time in enumerate(range(0, 660, 33))]
    found, warnings = decode(timed(shaken, container, codec))
    assert (found.fps, warnings) == (pytest.approx(1000 / 33, rel=0.005), ())


def test_frames_pixels_and_seconds_have_limits():
    data = film(frames=9)
    decode(data, max_frames=9, max_pixels=32 * 48, max_video_pixels=9 * 32 * 48, max_seconds=9 / 8)
    refused(data, reason="INPUT_TOO_LARGE", match="the maximum is 8", max_frames=8)
    refused(data, reason="INPUT_TOO_LARGE", match="48 x 32", max_pixels=32 * 48 - 1)
    refused(data, reason="INPUT_TOO_LARGE", match="over all frames", max_video_pixels=9 * 32 * 48 - 1)
    refused(data, reason="INPUT_TOO_LARGE", match="the maximum is 1 s", max_seconds=1)


def test_frames_are_counted_where_the_header_does_not_say():
    data = film(frames=9, container="webm", codec="libvpx")
    assert decode(data)[0].num_frames == 9
    refused(data, reason="INPUT_TOO_LARGE", match="has 9 frames or more", max_frames=8)


def test_other_files_are_refused():
    refused(b"", reason="INPUT_EMPTY")
    refused(saved(still(), "PNG"), reason="INPUT_UNREADABLE", match="image/png")
    refused(film(), "video/webm", reason="INPUT_TYPE_MISMATCH")
    refused(film(), reason="INPUT_TOO_LARGE", max_bytes=100)
    refused(film(container="matroska", codec="ffv1"), reason="INPUT_NOT_SUPPORTED", match="ffv1")


def test_a_playlist_opens_no_other_file():
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    refused(playlist, reason="INPUT_UNREADABLE", match="an unknown type")
    refused(b"ffconcat version 1.0\nfile /etc/passwd\n", reason="INPUT_UNREADABLE", match="an unknown type")


@pytest.mark.parametrize("format", [VideoFormat.MP4, VideoFormat.FMP4])
def test_a_truncated_image_is_refused(format):
    noise = np.random.default_rng(0).integers(0, 256, (8, 64, 64, 3), dtype=np.uint8)
    data = media.encode_video(noise, 8, format)
    refused(data[:200], reason="INPUT_UNREADABLE")
    refused(data[: len(data) // 2], reason="INPUT_UNREADABLE")
