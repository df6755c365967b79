"""A made-up model that does every task, its fake worker, and media to send to it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import random
import struct
import wave
from collections.abc import AsyncIterator
from typing import Any

import av
import numpy as np
import PIL.Image

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.resolve.rules import TAKEN
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.media import Modality
from omni_grpc.types.plan import Media
from omni_grpc.types.request import Guidance, Request, Task
from omni_grpc.types.spec import Checkpoint, Defaults, GuidanceKind, Limits
from tests.toy import toy_checkpoint

from .fake_executor import FakeExecutor
from .service import Service, served

FPS, RATE = 8.0, 16_000


def studio(**changes: Any) -> Checkpoint:
    """Frames are 4k + 1 up to 81, at 8 fps unless asked otherwise; at most two images."""
    limits = {
        "size_multiple": 16, "min_size": 16, "max_size": 1024, "max_pixels": 512 * 512, "max_prompt_tokens": 77,
        "max_input_images": 2, "max_frames": 81, "frame_multiple": 4, "frame_offset": 1, "max_duration": 30.0,
    }  # fmt: skip
    values = {
        "tasks": tuple(task for task in Task if task is not Task.LAYERED),
        "takes": frozenset(TAKEN) - {"duration"} | {"extra"},
        "guidance": (GuidanceKind.TRUE_CFG,),
        "exclusive": True,
        "limits": lambda configs: Limits(**limits),
        "defaults": lambda configs: Defaults(
            width=64, height=32, steps=2, guidance=Guidance(true_cfg_scale=4.0), num_frames=9, fps=FPS, strength=0.75
        ),
    }
    return toy_checkpoint(**(values | changes))


class StudioExecutor(FakeExecutor):
    """Videos and sounds are noise too, with the figures that a request asks for; nobody here decodes them."""

    def _media(self, request: Request, index: int) -> Media:
        if request.task.modality is Modality.IMAGE:
            return super()._media(request, index)
        seed = request.seeds[index]
        data = noise(seed)
        figures: dict[str, Any] = {"sample_rate": request.sample_rate_hz or RATE, "duration": request.duration or 1.0}
        if request.task.modality is Modality.VIDEO:
            frames, fps = request.num_frames or 1, request.output_fps or request.fps or FPS
            figures = {"num_frames": frames, "fps": fps, "duration": frames / fps}
        return Media(
            index=index,
            data=shared.put(data, next(self._blocks)),
            mime_type=request.output_format.mime_type,
            width=request.width,
            height=request.height,
            seed=seed,
            sha256=hashlib.sha256(data).hexdigest(),
            **figures,
        )

    @property
    def request(self) -> Request:
        """The newest that was handed to the worker."""
        return next(request for plan in reversed(self.plans) for request in plan.admit)


@contextlib.asynccontextmanager
async def serving_studio(checkpoint: Checkpoint | None = None, **settings: Any) -> AsyncIterator[Service]:
    config = EngineConfig.from_settings(**({"model": "toy", "port": 0} | settings))
    executor = StudioExecutor()
    engine = Engine(config, checkpoint or studio(), executor)
    async with served(config, engine, executor) as service:
        yield service


def noise(seed: int, size: int = 1000) -> bytes:
    return random.Random(seed).randbytes(size)


def pixels(width: int = 32, height: int = 16, *, mode: str = "RGB", seed: int = 0) -> PIL.Image.Image:
    image = PIL.Image.frombytes("RGBA", (width, height), noise(seed, width * height * 4))
    return image.convert(mode)


def png(width: int = 32, height: int = 16, *, mode: str = "RGB", seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    pixels(width, height, mode=mode, seed=seed).save(buffer, "PNG")
    return buffer.getvalue()


def mp4(frames: int = 5, width: int = 32, height: int = 16, fps: int = 10) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), 40 * index % 256, np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def wav(seconds: float = 0.5, rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        samples = (int(8000 * math.sin(index / 10)) for index in range(int(seconds * rate)))
        file.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return buffer.getvalue()
