"""The Python client of omni_grpc servers: everything that `omni_grpc.client` has, and its errors.

with Client("localhost:50051") as client:
    client.generate_image("a red circle", seed=7).save("out.png")
"""

from omni_grpc.client import *  # noqa: F403
from omni_grpc.client import __all__ as _client
from omni_grpc.types.errors import (
    Aborted,
    AlreadyExists,
    Code,
    DeadlineExceeded,
    FailedPrecondition,
    Failure,
    InternalError,
    InvalidArgument,
    NotFound,
    OmniError,
    OperationCancelled,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Violation,
)
from omni_grpc.types.version import __version__

__all__ = [
    *_client,
    "Aborted",
    "AlreadyExists",
    "Code",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Failure",
    "InternalError",
    "InvalidArgument",
    "NotFound",
    "OmniError",
    "OperationCancelled",
    "OutOfRange",
    "PermissionDenied",
    "ResourceExhausted",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Violation",
    "__version__",
]
