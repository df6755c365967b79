"""Encodes outputs in the worker, so that the server process never does."""

from omni_grpc.worker.media.audio import count_clipped, encode_audio, encoded_rate
from omni_grpc.worker.media.image import Image, encode, fit, keeps_alpha
from omni_grpc.worker.media.video import encode_video, encoded_size, frame_rate
from omni_grpc.worker.memory import peak_memory_bytes

__all__ = [
    "Image",
    "count_clipped",
    "encode",
    "encode_audio",
    "encode_video",
    "encoded_rate",
    "encoded_size",
    "fit",
    "frame_rate",
    "keeps_alpha",
    "peak_memory_bytes",
]
