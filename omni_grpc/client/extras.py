"""What the client needs beside gRPC for some of what it does, and does not load before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around an import of what an extra of omni-grpc-client brings: says how to get it where it is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed; pip install 'omni-grpc-client[{extra}]'") from error
