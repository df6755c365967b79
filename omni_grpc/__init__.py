"""omni_grpc: a server for diffusion models that streams every denoise step over gRPC, and its offline form.

Importing this package loads neither torch nor grpc; `Omni` does when it is used. It is part of the distribution
omni-grpc-client as well, which has the client without the server.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from omni_grpc.config import EngineConfig
    from omni_grpc.omni import Generation, Omni

_OF_THE_SERVER: Mapping[str, str] = {
    "EngineConfig": "omni_grpc.config",
    "Generation": "omni_grpc.omni",
    "Omni": "omni_grpc.omni",
}
"""What the client alone does not have -> its module."""


def __getattr__(name: str) -> Any:
    if name not in _OF_THE_SERVER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _OF_THE_SERVER[name]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ImportError(f"{name} needs the server: pip install omni-grpc (this is omni-grpc-client)") from error


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
