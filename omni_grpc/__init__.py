"""omni_grpc: a server for diffusion models that streams every denoise step over gRPC, and its offline form.

Importing this package loads neither torch nor grpc; `Omni` does when it is used.
"""

from omni_grpc.config import EngineConfig
from omni_grpc.omni import Generation, Omni
from omni_grpc.types.errors import (
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
from omni_grpc.types.events import Event
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.request import Draft, Guidance, GuidanceDraft, GuidanceNorm, Request, Task
from omni_grpc.types.version import __version__

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
