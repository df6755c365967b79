"""What is kept here, as one caller sees it: what belongs to another tenant does not exist."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping
from typing import TypeVar

from omni_grpc.engine import Job, JobState
from omni_grpc.fleet import Fleet
from omni_grpc.gate.refusals import refused
from omni_grpc.store.journal import refusal
from omni_grpc.store.records import ArtifactRow, JobQuery, Position
from omni_grpc.store.seam import StoreError
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import NotFound
from omni_grpc.types.results import Artifact

T = TypeVar("T")


class Stored:
    """Jobs, outputs and assets by caller. Every function raises Unavailable (STORE_UNAVAILABLE) where they cannot be
    read.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._files = fleet.storage.store.files

    async def job(self, caller: Caller, job_id: str) -> Job:
        """Raises InvalidArgument without an id, NotFound (JOB_NOT_FOUND) for a job that the caller has not."""
        if not job_id:
            raise refused("job_id", "is required")
        with available():
            return await self._fleet.jobs.find(job_id, caller.sees)

    def jobs(
        self, caller: Caller, *, states: Collection[JobState] = (), labels: Mapping[str, str] | None = None
    ) -> list[Job]:
        """The caller's jobs that are here in full, newest first: all that have not ended are."""
        return self._fleet.jobs.newest(states=states, labels=labels, tenant=caller.sees)

    async def page(self, query: JobQuery) -> list[Job]:
        """Jobs, newest first, wherever they are."""
        with available():
            return await self._fleet.jobs.page(query)

    async def artifact(self, caller: Caller, artifact_id: str) -> tuple[Job, Artifact]:
        """An output with its job. Raises InvalidArgument without an id, NotFound (ARTIFACT_NOT_FOUND)."""
        if not artifact_id:
            raise refused("artifact_id", "is required")
        with available():
            return await self._artifact(caller, artifact_id)

    async def _artifact(self, caller: Caller, artifact_id: str) -> tuple[Job, Artifact]:
        row = await self._fleet.artifacts.find(artifact_id, caller.sees)
        found = await self._with_job(row)
        if found is None:
            raise self._fleet.forgotten.not_found(artifact_id, reason="ARTIFACT_NOT_FOUND", tenant=caller.sees)
        return found

    async def _with_job(self, row: ArtifactRow) -> tuple[Job, Artifact] | None:
        """None for an output whose job is about to go, or which its log does not show yet."""
        try:
            job = await self._fleet.jobs.find(row.job_id)
        except NotFound:
            return None
        return next(((job, one) for one in job.outputs if one.artifact_id == row.artifact_id), None)

    async def artifacts(
        self, caller: Caller, *, job_id: str = "", after: Position | None = None, limit: int
    ) -> list[tuple[Job, Artifact, Position]]:
        """Outputs of one job, or of all that the caller has, whose bytes are still there, newest first."""
        shown: list[tuple[Job, Artifact, Position]] = []
        with available():
            while len(shown) < limit:
                rows = await self._files.artifacts(tenant=caller.sees, job_id=job_id, after=after, limit=limit)
                for row in rows:
                    after = (row.create_time, row.artifact_id)
                    if (found := await self._with_job(row)) is not None:
                        shown.append((*found, after))
                if len(rows) < limit:
                    break
        return shown[:limit]

    async def medium(self, caller: Caller, path: str, name: str) -> tuple[bytes, str]:
        """Bytes and type of an uploaded asset or of an output of an earlier job, for the input at `path`."""
        with available():
            with contextlib.suppress(NotFound):
                asset = await self._fleet.assets.use(name, caller.sees)
                return await self._fleet.assets.data(name), asset.mime_type
            try:
                _, artifact = await self._artifact(caller, name)
                return await self._fleet.artifacts.data(name), artifact.mime_type
            except NotFound:
                raise self._fleet.forgotten.not_found(
                    name, reason="ASSET_NOT_FOUND", tenant=caller.sees, path=path, hint="upload it again"
                ) from None


@contextlib.contextmanager
def available() -> Iterator[None]:
    """Raises Unavailable (STORE_UNAVAILABLE) for what the store cannot do."""
    try:
        yield
    except StoreError as error:
        raise refusal(error) from error


async def read(pieces: AsyncIterator[T]) -> AsyncGenerator[T]:
    """The same pieces, with the refusal of a store that fails on the way."""
    with available():
        async for piece in pieces:
            yield piece
