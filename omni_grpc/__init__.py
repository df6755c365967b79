"""omni_grpc: a server for diffusion models that streams every denoise step over gRPC, and its offline form.

Importing this package loads neither torch nor grpc; `Omni` does when it is used.
"""

from omni_grpc.config import EngineConfig
from omni_grpc.errors import (
    Aborted,
    CheckpointError,
    ConfigError,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    NotFound,
    OmniError,
    ResourceExhausted,
    Unavailable,
)
from omni_grpc.omni import Generation, Omni
from omni_grpc.request import Draft, Event, Guidance, GuidanceDraft, GuidanceNorm, ImageFormat, Request, Task
from omni_grpc.version import __version__

__all__ = [
    "Aborted",
    "CheckpointError",
    "ConfigError",
    "Draft",
    "EngineConfig",
    "Event",
    "FailedPrecondition",
    "Generation",
    "Guidance",
    "GuidanceDraft",
    "GuidanceNorm",
    "ImageFormat",
    "InternalError",
    "InvalidArgument",
    "NotFound",
    "Omni",
    "OmniError",
    "Request",
    "ResourceExhausted",
    "Task",
    "Unavailable",
    "__version__",
]
