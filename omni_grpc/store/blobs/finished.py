"""Waiting for what must not be left halfway."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from omni_grpc.types.os_errors import plain

_T = TypeVar("_T")
logger = logging.getLogger(__name__)


async def finished(work: asyncio.Future[_T]) -> _T:
    """What comes of it. Who is cancelled meanwhile is so after its end, not before."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return work.result()
    if (failure := work.exception()) is not None:
        logger.info("what was cancelled had failed: %s", plain(failure))
    raise cancelled
