# generated from async_connection.py by tools/gen_sync_client.py; do not edit
"""The connection of the synchronous client: one channel, its stubs, and the calls that need retries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import grpc

from omni_grpc.client._sync import open_channel, refusal_was_lost, sleep
from omni_grpc.client.address import check_address
from omni_grpc.client.channel import UNARY_TIMEOUT, Deadline, Reconnect, Retry
from omni_grpc.client.credentials import CredentialOptions, credentials
from omni_grpc.client.download import DownloadState
from omni_grpc.client.failure import from_call
from omni_grpc.client.media import upload_messages
from omni_grpc.client.partial_artifact import PartialArtifact
from omni_grpc.types.errors import Failure
from omni_grpc.v1.admin_pb2_grpc import AdminServiceStub
from omni_grpc.v1.artifact_pb2 import UploadAssetResponse
from omni_grpc.v1.artifact_pb2_grpc import ArtifactServiceStub
from omni_grpc.v1.generation_pb2_grpc import GenerationServiceStub
from omni_grpc.v1.job_pb2 import CancelJobRequest, Job, WatchJobRequest
from omni_grpc.v1.job_pb2_grpc import JobServiceStub
from omni_grpc.v1.media_pb2 import MediaInput
from omni_grpc.v1.model_pb2_grpc import ModelServiceStub

UPLOAD_ATTEMPTS = 5
"""How often an upload is made whose refusal was lost."""


class Connection:
    """One channel to a server, with its stubs. Opened at the first call.

    Its methods raise the `OmniError` that the server sent, and Unavailable (SERVER_UNREACHABLE) if there is none.
    """

    def __init__(self, address: str, reconnect: Reconnect, retry: Retry, **options: Unpack[CredentialOptions]) -> None:
        self.address = check_address(address)
        self.reconnect = reconnect
        self._retry = retry
        self._channel = open_channel(self.address, credentials(self.address, **options))
        self.generation: GenerationServiceStub = GenerationServiceStub(self._channel)
        self.jobs: JobServiceStub = JobServiceStub(self._channel)
        self.artifacts: ArtifactServiceStub = ArtifactServiceStub(self._channel)
        self.models: ModelServiceStub = ModelServiceStub(self._channel)
        self.admin: AdminServiceStub = AdminServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def unary(self, rpc: Callable[..., Any], request: Any, timeout: float = UNARY_TIMEOUT) -> Any:
        """The reply to one request. `timeout` is in seconds."""
        deadline = Deadline(timeout)
        attempt = 0
        while True:
            try:
                return rpc(request, timeout=deadline.remaining())
            except grpc.RpcError as error:
                failure = from_call(error, self.address).failure
                if not self.has_waited(failure, attempt, deadline):
                    raise failure.error() from error
            attempt += 1

    def has_waited(self, failure: Failure, attempt: int, deadline: Deadline) -> bool:
        """Waits for as long as a server without room says, and returns True; False where the call is not to be made
        again.
        """
        if (pause := self._retry.pause(failure, attempt, deadline)) is None:
            return False
        sleep(pause)
        return True

    def open_watch(self, request: WatchJobRequest, deadline: Deadline) -> Any:
        """A WatchJob call, whose errors are still those of gRPC."""
        return self.jobs.WatchJob(request, timeout=deadline.remaining())

    def cancel_job(self, job_id: str, reason: str, timeout: float) -> Job:
        """Asks a job to stop, and returns it."""
        reply = self.unary(self.jobs.CancelJob, CancelJobRequest(job_id=job_id, reason=reason), timeout)
        job: Job = reply.job
        return job

    def download(self, artifact_id: str, deadline: Deadline, partial: PartialArtifact | None = None) -> PartialArtifact:
        """All bytes of an artifact. Continues after those in `partial`, and after each loss of the connection."""
        state = DownloadState(self.reconnect, artifact_id, partial)
        while True:
            try:
                for message in self.artifacts.DownloadArtifact(state.request(), timeout=deadline.remaining()):
                    state.accept(message)
                return state.finished()
            except grpc.RpcError as error:
                sleep(deadline.within(state.lost(from_call(error, self.address))))

    def upload(self, media: MediaInput, deadline: Deadline) -> UploadAssetResponse:
        """Stores the bytes in `media` on the server."""
        attempt = 1
        while True:
            messages = upload_messages(media.data, media.mime_type)
            try:
                stored: UploadAssetResponse = self.artifacts.UploadAsset(messages, timeout=deadline.remaining())
                return stored
            except grpc.RpcError as error:
                if attempt == UPLOAD_ATTEMPTS or not refusal_was_lost(error):
                    raise from_call(error, self.address).failure.error() from error
            attempt += 1
