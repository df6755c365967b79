"""What is kept here, as one caller sees it: what belongs to another tenant does not exist."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

from omni_grpc.engine import Engine, Job, JobState
from omni_grpc.gate.refusals import refused
from omni_grpc.store.records import Asset
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import NotFound
from omni_grpc.types.events import ArtifactReady
from omni_grpc.types.results import Artifact


class Stored:
    """Jobs, outputs and assets by caller."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def job(self, caller: Caller, job_id: str) -> Job:
        """Raises InvalidArgument without an id, NotFound (JOB_NOT_FOUND) for a job that the caller has not."""
        if not job_id:
            raise refused("job_id", "is required")
        return self._engine.jobs.get(job_id, caller.sees)

    def jobs(
        self, caller: Caller, *, states: Collection[JobState] = (), labels: Mapping[str, str] | None = None
    ) -> list[Job]:
        """The caller's jobs, newest first."""
        return self._engine.jobs.newest(states=states, labels=labels, tenant=caller.sees)

    def artifact(self, caller: Caller, artifact_id: str) -> tuple[Job, Artifact, bytes]:
        """An output with its job and its bytes. Raises InvalidArgument without an id, NotFound (ARTIFACT_NOT_FOUND)."""
        if not artifact_id:
            raise refused("artifact_id", "is required")
        return self._artifact(caller, artifact_id)

    def _artifact(self, caller: Caller, artifact_id: str) -> tuple[Job, Artifact, bytes]:
        artifact, data = self._engine.artifacts.get(artifact_id, caller.sees)
        return self._engine.jobs.get(artifact.job_id), artifact, data

    def artifacts(self, caller: Caller, job: Job | None) -> Iterator[tuple[Job, Artifact, float]]:
        """Outputs of one job, or of all that the caller has, whose bytes are still there, with the time of each."""
        for one in self.jobs(caller) if job is None else (job,):
            for artifact, stored in artifacts_of(one).items():
                try:
                    self._engine.artifacts.get(artifact.artifact_id)
                except NotFound:
                    continue
                yield one, artifact, stored

    def asset(self, caller: Caller, asset_id: str) -> tuple[Asset, bytes]:
        """An upload, whose expiry is extended. Raises NotFound (ASSET_NOT_FOUND)."""
        return self._engine.assets.get(asset_id, caller.sees)

    def medium(self, caller: Caller, path: str, name: str) -> tuple[bytes, str]:
        """Bytes and type of an uploaded asset or of an output of an earlier job, for the input at `path`."""
        with contextlib.suppress(NotFound):
            asset, data = self.asset(caller, name)
            return data, asset.mime_type
        try:
            _, artifact, data = self._artifact(caller, name)
            return data, artifact.mime_type
        except NotFound:
            raise self._engine.forgotten.not_found(
                name, reason="ASSET_NOT_FOUND", tenant=caller.sees, path=path, hint="upload it again"
            ) from None


def artifacts_of(job: Job) -> dict[Artifact, float]:
    """The outputs that a job has stored so far, by index, with the time of each."""
    return {entry.event.artifact: entry.time for entry in job.entries if isinstance(entry.event, ArtifactReady)}
