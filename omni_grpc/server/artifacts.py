"""ArtifactService: the bytes of outputs, in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

from omni_grpc.engine import Engine, Job
from omni_grpc.errors import NotFound, OutOfRange
from omni_grpc.request import Artifact
from omni_grpc.server.messages import Messages, stored_artifacts
from omni_grpc.server.pages import page
from omni_grpc.server.requests import refused
from omni_grpc.v1 import artifact_pb2, artifact_pb2_grpc


class ArtifactService(artifact_pb2_grpc.ArtifactServiceServicer):
    def __init__(self, engine: Engine, messages: Messages) -> None:
        self._engine = engine
        self._messages = messages

    async def DownloadArtifact(
        self, request: artifact_pb2.DownloadArtifactRequest, context: Any
    ) -> AsyncGenerator[artifact_pb2.DownloadArtifactResponse]:
        artifact = self._artifact(request.artifact_id)
        if request.offset > artifact.size_bytes:
            raise OutOfRange(
                f"offset is {request.offset}, but artifact {artifact.id} has {artifact.size_bytes} bytes",
                reason="OFFSET_OUT_OF_RANGE",
                metadata={"size_bytes": str(artifact.size_bytes)},
            )
        end = request.offset + request.max_bytes if request.HasField("max_bytes") else artifact.size_bytes
        job = self._engine.jobs.get(artifact.job_id)
        yield artifact_pb2.DownloadArtifactResponse(metadata=self._messages.artifact(job, artifact))
        for chunk in self._messages.chunks(artifact.id, request.offset, end):
            yield artifact_pb2.DownloadArtifactResponse(chunk=chunk)

    async def ListArtifacts(
        self, request: artifact_pb2.ListArtifactsRequest, context: Any
    ) -> artifact_pb2.ListArtifactsResponse:
        jobs = [self._engine.jobs.get(request.job_id)] if request.job_id else self._engine.jobs.newest()
        kept = [entry for job in jobs for entry in self._kept(job)]
        shown, token = page(kept, lambda entry: (entry[2], entry[1].id), request)
        return artifact_pb2.ListArtifactsResponse(
            artifacts=[self._messages.artifact(job, artifact) for job, artifact, _ in shown], next_page_token=token
        )

    async def DeleteArtifact(
        self, request: artifact_pb2.DeleteArtifactRequest, context: Any
    ) -> artifact_pb2.DeleteArtifactResponse:
        self._engine.artifacts.delete(self._artifact(request.artifact_id).id)
        return artifact_pb2.DeleteArtifactResponse()

    def _artifact(self, artifact_id: str) -> Artifact:
        if not artifact_id:
            raise refused("artifact_id", "is required")
        return self._engine.artifacts.get(artifact_id)[0]

    def _kept(self, job: Job) -> Iterator[tuple[Job, Artifact, float]]:
        """Outputs of a job whose bytes are still there, with the time at which they were stored."""
        for artifact, stored in stored_artifacts(job).items():
            try:
                self._engine.artifacts.get(artifact.id)
            except NotFound:
                continue
            yield job, artifact, stored
