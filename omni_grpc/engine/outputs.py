"""From the worker's shared memory to where outputs are kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from omni_grpc.store.artifacts import Artifacts
from omni_grpc.store.seam import StoreError
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.plan import SharedBytes
from omni_grpc.types.results import Artifact

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds for which an output is offered to a store that cannot take it, before its job fails."""
FIRST_RETRY, MAX_RETRY = 0.1, 5.0
"""Seconds between two tries: doubled each time."""
PIECE_BYTES = 1 << 20
"""Bytes that are read from shared memory at once: a fifth of a millisecond."""


class Outputs:
    """Stores the outputs of jobs, one task for each job, so that neither the loop nor the worker waits for a disk."""

    def __init__(self, artifacts: Artifacts, *, immediate: bool) -> None:
        self._artifacts = artifacts
        self.immediate = immediate
        """Whether storing waits for nothing."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def take(self, blocks: Sequence[SharedBytes]) -> list[SharedBytes]:
        """Takes blocks out of the reach of whoever cleans up after their worker. Whoever gets them discards them.
        Raises FileNotFoundError where one is gone; then all are.
        """
        if self.immediate:
            files = shared.take_all(blocks)
            return [
                SharedBytes(name=block.name, size=block.size, data=data)
                for block, data in zip(blocks, files, strict=True)
            ]
        return shared.move_all(blocks, shared.own_prefix("out").removesuffix("-"))

    async def keep(self, artifacts: Sequence[Artifact], blocks: Sequence[SharedBytes], *, tenant: str) -> None:
        """Stores each output, and discards its block. All of them, or none. Raises Unavailable (OUTPUT_NOT_STORED)."""
        stored: list[Artifact] = []
        try:
            for artifact, block in zip(artifacts, blocks, strict=True):
                await self._patiently(artifact, block, tenant)
                stored.append(artifact)
        except BaseException:
            await self._artifacts.discard(stored, tenant=tenant)
            raise
        finally:
            shared.discard_all(blocks)

    async def _patiently(self, artifact: Artifact, block: SharedBytes, tenant: str) -> None:
        until, pause = time.monotonic() + PATIENCE, FIRST_RETRY
        while True:
            try:
                await self._artifacts.put(artifact, pieces_of(block), tenant=tenant)
                return
            except StoreError as error:
                if time.monotonic() + pause > until or not error.retryable:
                    raise not_stored(error).error() from error
                logger.warning("output %s is not stored yet: %s", artifact.artifact_id, error)
                await asyncio.sleep(pause)
                pause = min(MAX_RETRY, 2 * pause)

    def start(self, job_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which stores the outputs of a job."""
        task = self._tasks[job_id] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(job_id, None))

    def stop(self, job_id: str) -> None:
        """The outputs of a job are not wanted any more."""
        # not the one that says so itself
        if (task := self._tasks.get(job_id)) is not None and task is not asyncio.current_task():
            task.cancel()

    async def close(self) -> None:
        """Returns when nothing is being stored any more, and what was not wanted is gone."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._tasks


def not_stored(error: StoreError) -> Failure:
    """The failure of a job whose output nobody could take."""
    return Failure(
        code=Code.UNAVAILABLE, reason="OUTPUT_NOT_STORED", message=f"the output could not be stored: {error}"
    )


async def pieces_of(block: SharedBytes) -> AsyncIterator[bytes]:
    """The bytes of a block that was taken, which stays."""
    if block.data is not None:
        yield block.data
        return
    for piece in shared.pieces(block, PIECE_BYTES):
        yield piece
