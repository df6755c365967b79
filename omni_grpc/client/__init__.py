"""The Python client: `Client`, and `AsyncClient` with the same methods for asyncio. Does not import torch."""

from omni_grpc.client.async_client import AsyncClient
from omni_grpc.client.async_stream import AsyncJobStream
from omni_grpc.client.channel import Reconnect, Retry
from omni_grpc.client.client import Client
from omni_grpc.client.load import Loaded, LoadEvent, ModelReady
from omni_grpc.client.media import MediaSource
from omni_grpc.client.options import AudioOptions, EditOptions, ImageOptions, VideoOptions
from omni_grpc.client.pipeline import Pipeline, PipelineOutput
from omni_grpc.client.result import AudioResult, ImageResult, MediaResult, VideoResult
from omni_grpc.client.saving import ParametersNotWritten
from omni_grpc.client.stream import JobStream
from omni_grpc.metadata import parameters_in
from omni_grpc.types.load_progress import Loading, LoadPhase

__all__ = [
    "AsyncClient",
    "AsyncJobStream",
    "AudioOptions",
    "AudioResult",
    "Client",
    "EditOptions",
    "ImageOptions",
    "ImageResult",
    "JobStream",
    "LoadEvent",
    "LoadPhase",
    "Loaded",
    "Loading",
    "MediaResult",
    "MediaSource",
    "ModelReady",
    "ParametersNotWritten",
    "Pipeline",
    "PipelineOutput",
    "Reconnect",
    "Retry",
    "VideoOptions",
    "VideoResult",
    "parameters_in",
]
