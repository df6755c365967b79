# generated from async_client.py by tools/gen_sync_client.py; do not edit
"""The synchronous client."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, cast

import grpc

from omni_grpc.client import messages
from omni_grpc.client.admin import Admin
from omni_grpc.client.asked import asked_of
from omni_grpc.client.channel import UNARY_TIMEOUT, Deadline, Reconnect, Retry
from omni_grpc.client.connection import Connection
from omni_grpc.client.credentials import CredentialOptions
from omni_grpc.client.failure import from_call
from omni_grpc.client.load import LoadEvent, load_event
from omni_grpc.client.media import MediaSource, file_input, too_large
from omni_grpc.client.options import AudioOptions, EditOptions, ImageOptions, VideoOptions
from omni_grpc.client.progress import progress_display
from omni_grpc.client.result import AudioResult, ImageResult, MediaResult, VideoResult
from omni_grpc.client.stream import JobStream, watch_job
from omni_grpc.client.watch import WatchState
from omni_grpc.types.errors import OmniError
from omni_grpc.v1.admin_pb2 import GetServerInfoRequest, GetServerInfoResponse, LoadModelRequest
from omni_grpc.v1.artifact_pb2 import UploadAssetResponse
from omni_grpc.v1.job_pb2 import CreateJobRequest, GetJobRequest, Job
from omni_grpc.v1.model_pb2 import ListModelsRequest, Model
from omni_grpc.v1.options_pb2 import ARTIFACT_DELIVERY_INLINE_CHUNKS
from omni_grpc.wire import read_event


class Client:
    """The synchronous client of a server. Threads may share it.

    The connection is opened at the first call. Every method raises the `OmniError` that the server sent, or Unavailable
    (SERVER_UNREACHABLE) if it cannot be reached. `timeout` is the number of seconds that the caller waits for the whole
    method, None for no limit. It does not limit the job. `reconnect` says how a lost stream is resumed, `retry` how
    a call is made again for which there is no room now. The address is HOST:PORT or unix:PATH. `ca`, `cert`, `key`,
    `tls`, `token` and `insecure` are those of `CredentialOptions`. `admin` has the calls of operators.

    with Client("localhost:50051") as client:
        result = client.generate_image("a red circle", seed=7)
        result.save("out.png")
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        reconnect: Reconnect | None = None,
        retry: Retry | None = None,
        **options: Unpack[CredentialOptions],
    ) -> None:
        self._connection = Connection(address, reconnect or Reconnect(), retry or Retry(), **options)
        self.address = self._connection.address
        self.admin = Admin(self._connection)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and ends every call that is still open."""
        self._connection.close()

    # --- generation -------------------------------------------------------------------------------------------------

    def generate_image(
        self,
        prompt: str,
        *,
        model: str | None = None,
        progress: bool = False,
        timeout: float | None = None,
        **options: Unpack[ImageOptions],
    ) -> ImageResult:
        """Generates images and waits for them. `model` may be omitted if the server has only one.

        `progress` shows a progress bar on stderr. Ctrl-C, a `timeout` that passes and any other exception
        cancel the job on the server first.
        """
        stream = self.stream(prompt, model=model, timeout=timeout, **options)
        return cast(ImageResult, _follow(stream, progress))

    def stream(
        self,
        prompt: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[ImageOptions],
    ) -> JobStream:
        """Generates images and yields the job's events as they happen. Returns with the first, or raises the refusal.

        Use it as `with client.stream(...) as stream`: leaving the block early cancels the job.
        """
        deadline = Deadline(timeout)
        request = messages.image_request(model or self._only_model(deadline), prompt, options)
        return self._stream(self._connection.generation.GenerateImage, request, deadline)

    def edit_image(
        self,
        prompt: str,
        *,
        images: Sequence[MediaSource],
        model: str | None = None,
        progress: bool = False,
        timeout: float | None = None,
        **options: Unpack[EditOptions],
    ) -> ImageResult:
        """Generates images from images and waits for them, as `generate_image` does.

        Each image is a path, a data: URL, an https URL that the server may fetch, bytes, a PIL image, a uint8 array,
        what `upload` returned, or an output of an earlier job.
        """
        stream = self.stream_edit(prompt, images=images, model=model, timeout=timeout, **options)
        return cast(ImageResult, _follow(stream, progress))

    def stream_edit(
        self,
        prompt: str,
        *,
        images: Sequence[MediaSource],
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[EditOptions],
    ) -> JobStream:
        """The events of `edit_image` as they happen, see `stream`."""
        deadline = Deadline(timeout)
        request = messages.edit_request(model or self._only_model(deadline), prompt, images, options)
        return self._stream(self._connection.generation.EditImage, request, deadline)

    def generate_video(
        self,
        prompt: str,
        *,
        model: str | None = None,
        progress: bool = False,
        timeout: float | None = None,
        **options: Unpack[VideoOptions],
    ) -> VideoResult:
        """Generates videos and waits for them, as `generate_image` does."""
        stream = self.stream_video(prompt, model=model, timeout=timeout, **options)
        return cast(VideoResult, _follow(stream, progress))

    def stream_video(
        self,
        prompt: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[VideoOptions],
    ) -> JobStream:
        """The events of `generate_video` as they happen, see `stream`."""
        deadline = Deadline(timeout)
        request = messages.video_request(model or self._only_model(deadline), prompt, options)
        return self._stream(self._connection.generation.GenerateVideo, request, deadline)

    def generate_audio(
        self,
        prompt: str,
        *,
        model: str | None = None,
        progress: bool = False,
        timeout: float | None = None,
        **options: Unpack[AudioOptions],
    ) -> AudioResult:
        """Generates audio and waits for it, as `generate_image` does."""
        stream = self.stream_audio(prompt, model=model, timeout=timeout, **options)
        return cast(AudioResult, _follow(stream, progress))

    def stream_audio(
        self,
        prompt: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[AudioOptions],
    ) -> JobStream:
        """The events of `generate_audio` as they happen, see `stream`."""
        deadline = Deadline(timeout)
        request = messages.audio_request(model or self._only_model(deadline), prompt, options)
        return self._stream(self._connection.generation.GenerateAudio, request, deadline)

    # --- jobs -------------------------------------------------------------------------------------------------------

    def create_job(self, prompt: str, *, model: str | None = None, **options: Unpack[ImageOptions]) -> Job:
        """Queues a job that outlives this client. `watch_job(job.job_id).result()` waits for its images."""
        deadline = Deadline(UNARY_TIMEOUT)
        request = messages.image_request(model or self._only_model(deadline), prompt, options)
        return self._create_job(CreateJobRequest(generate_image=request))

    def create_edit_job(
        self, prompt: str, *, images: Sequence[MediaSource], model: str | None = None, **options: Unpack[EditOptions]
    ) -> Job:
        """`create_job` for an edit."""
        deadline = Deadline(UNARY_TIMEOUT)
        request = messages.edit_request(model or self._only_model(deadline), prompt, images, options)
        self._upload_large_media(request, deadline)
        return self._create_job(CreateJobRequest(edit_image=request))

    def create_video_job(self, prompt: str, *, model: str | None = None, **options: Unpack[VideoOptions]) -> Job:
        """`create_job` for a video."""
        deadline = Deadline(UNARY_TIMEOUT)
        request = messages.video_request(model or self._only_model(deadline), prompt, options)
        self._upload_large_media(request, deadline)
        return self._create_job(CreateJobRequest(generate_video=request))

    def create_audio_job(self, prompt: str, *, model: str | None = None, **options: Unpack[AudioOptions]) -> Job:
        """`create_job` for audio."""
        deadline = Deadline(UNARY_TIMEOUT)
        request = messages.audio_request(model or self._only_model(deadline), prompt, options)
        self._upload_large_media(request, deadline)
        return self._create_job(CreateJobRequest(generate_audio=request))

    def get_job(self, job_id: str) -> Job:
        """The current state of a job."""
        reply = self._connection.unary(self._connection.jobs.GetJob, GetJobRequest(job_id=job_id))
        job: Job = reply.job
        return job

    def list_jobs(self, *, limit: int = 50, **filters: Unpack[messages.JobFilters]) -> list[Job]:
        """The newest `limit` jobs that fit, newest first. `states` (["RUNNING"]) selects the jobs in one of these
        states, `labels` those that have all of these labels; see `JobFilters`.
        """
        request = messages.list_jobs_request(filters, limit)
        jobs: list[Job] = []
        while len(jobs) < limit:
            page = self._connection.unary(self._connection.jobs.ListJobs, request)
            jobs += page.jobs
            request.page_token = page.next_page_token
            if not page.next_page_token:
                break
        return jobs[:limit]

    def iter_jobs(self, **filters: Unpack[messages.JobFilters]) -> Generator[Job, None, None]:
        """All jobs that fit, newest first, page by page: as many as there are, a page of them in memory. Jobs that are
        made meanwhile are not among them.

        for job in client.iter_jobs(states=["FAILED"]):
            print(job.job_id)
        """
        request = messages.list_jobs_request(filters, page=messages.MAX_PAGE)
        while True:
            page = self._connection.unary(self._connection.jobs.ListJobs, request)
            yield from page.jobs
            if not (token := page.next_page_token):
                return
            request.page_token = token

    def watch_job(self, job_id: str, after_seq: int = 0, *, timeout: float | None = None) -> JobStream:
        """The events of a job with a seq greater than `after_seq`: those so far, then those to come, to its end."""
        return watch_job(self._connection, job_id, after_seq, Deadline(timeout))

    def cancel_job(self, job_id: str, reason: str = "", *, timeout: float = UNARY_TIMEOUT) -> Job:
        """Asks a job to stop, and returns it. A job that has already ended is returned unchanged."""
        return self._connection.cancel_job(job_id, reason, timeout)

    # --- artifacts --------------------------------------------------------------------------------------------------

    def download(self, artifact_id: str, *, timeout: float | None = None) -> bytes:
        """The bytes of an artifact, checked against its SHA-256."""
        downloaded = self._connection.download(artifact_id, Deadline(timeout))
        return downloaded.data()

    def upload(
        self, media: str | Path | bytes, *, mime_type: str = "", timeout: float | None = None
    ) -> UploadAssetResponse:
        """Stores a file on the server, for use in several requests. A request uploads its own large media by itself."""
        given = file_input(media)
        given.mime_type = mime_type or given.mime_type
        return self._connection.upload(given, Deadline(timeout))

    # --- the server -------------------------------------------------------------------------------------------------

    def list_models(self) -> list[Model]:
        """The models of the server, with their limits and defaults."""
        return self._list_models(UNARY_TIMEOUT)

    def server_info(self) -> GetServerInfoResponse:
        """Version, devices and limits of the server."""
        request = GetServerInfoRequest()
        info: GetServerInfoResponse = self._connection.unary(self._connection.admin.GetServerInfo, request)
        return info

    def load_model(self, model: str | None = None, *, timeout: float | None = None) -> Generator[LoadEvent, None, None]:
        """Follows how the server loads its model: yields Loading whenever the progress changes, and ModelReady at the
        end. Raises the error that keeps the model from loading.

        for event in client.load_model():
            print(event)
        """
        deadline = Deadline(timeout)
        request = LoadModelRequest(model=model or self._only_model(deadline))
        call = self._connection.admin.LoadModel(request, timeout=deadline.remaining())
        try:
            for message in call:
                yield load_event(message)
        except grpc.RpcError as error:
            raise from_call(error, self.address).failure.error() from error
        finally:
            call.cancel()

    # --- internal ---------------------------------------------------------------------------------------------------

    def _stream(self, rpc: Callable[..., Any], request: Any, deadline: Deadline) -> JobStream:
        asked = asked_of(request)
        self._upload_large_media(request, deadline)
        attempt = 0
        while True:
            watch = WatchState(self._connection.reconnect, ARTIFACT_DELIVERY_INLINE_CHUNKS, asked=asked)
            call = rpc(request, timeout=deadline.remaining())
            stream = JobStream(self._connection, call, watch, deadline, owner=True)
            try:
                stream.open()
                return stream
            except BaseException as error:
                stream.close()
                # no event came, so there is no job: an error of the server is a refusal
                refused = error.failure if isinstance(error, OmniError) else None
                if refused is None or not self._connection.has_waited(refused, attempt, deadline):
                    raise
            attempt += 1

    def _create_job(self, request: CreateJobRequest) -> Job:
        reply = self._connection.unary(self._connection.jobs.CreateJob, request)
        job: Job = reply.job
        return job

    def _upload_large_media(self, request: Any, deadline: Deadline) -> None:
        """Uploads the media of a request that are too large to be sent inside it."""
        for media in too_large(request):
            stored = self._connection.upload(media, deadline)
            media.asset_id = stored.asset_id

    def _only_model(self, deadline: Deadline) -> str:
        return messages.only_model(self._list_models(deadline.within(UNARY_TIMEOUT)))

    def _list_models(self, timeout: float) -> list[Model]:
        reply = self._connection.unary(self._connection.models.ListModels, ListModelsRequest(), timeout)
        return list(reply.models)


def _follow(stream: JobStream, progress: bool) -> MediaResult:
    """The result of a job. Shows its progress until then."""
    with stream, progress_display(progress) as show:
        for event in stream:
            show(read_event(event))
        return stream.result()
