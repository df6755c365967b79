"""Real files for the tests, made by the libraries that people make them with."""

import io

import av
import numpy as np
import PIL.Image

from omni_grpc.media_in import MediaLimits

LIMITS = MediaLimits(max_bytes=1 << 20, max_pixels=1 << 16, max_frames=32, max_video_pixels=1 << 20, max_seconds=4.0)
FIELD = "images[0]"


def picture(width=6, height=4):
    """RGB pixels that all differ."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return np.stack([x * 30, y * 50, 255 - x * 20 - y * 10], -1).astype(np.uint8)


def saved(image, format, **options):
    buffer = io.BytesIO()
    (image if isinstance(image, PIL.Image.Image) else PIL.Image.fromarray(image)).save(buffer, format, **options)
    return buffer.getvalue()


def film(frames=4, height=32, width=48, fps=8, container="mp4", codec="libx264", sound=False):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        tone = (
            output.add_stream("aac" if container == "mp4" else "libopus", rate=48000, layout="mono") if sound else None
        )
        for value in np.linspace(40, 200, frames).astype(np.uint8):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), value, np.uint8), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if tone is not None:
            output.mux(tone.encode(sound_frame(np.zeros((1, 24000), np.float32), 48000)))
            output.mux(tone.encode(None))
    return buffer.getvalue()


def sound_frame(samples, rate):
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(samples)]
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
    frame.sample_rate, frame.pts = rate, 0
    return frame


def tone(seconds=0.5, rate=16000, channels=1):
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    return np.repeat(wave[None].astype(np.float32), channels, 0)


def recording(samples, rate=16000, container="wav", codec="pcm_s16le", options=None):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options=options or {}) as output:
        layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(samples)]
        stream = output.add_stream(codec, rate=rate, layout=layout)
        packets = [*stream.encode(sound_frame(samples, rate)), *stream.encode(None)]
        output.mux(packets)
    return buffer.getvalue()
