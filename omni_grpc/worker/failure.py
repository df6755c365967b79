"""From an exception to what the user is told."""

from __future__ import annotations

import logging

import torch

from omni_grpc.errors import Code, Failure, OmniError

logger = logging.getLogger(__name__)


def failure(error: BaseException, doing: str) -> Failure:
    """Errors that were raised on purpose keep their code; running out of memory has one; the rest are ours, and are
    logged.
    """
    if isinstance(error, OmniError):
        return error.failure
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        message = f"out of memory while {doing}; ask for fewer outputs or a smaller size"
        return Failure(code=Code.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", message=message)
    logger.error("unexpected error while %s", doing, exc_info=error)
    message = f"{type(error).__name__} while {doing}: {error}"
    return Failure(code=Code.INTERNAL, reason="WORKER_ERROR", message=message)
