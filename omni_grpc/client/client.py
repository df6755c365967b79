"""The sync client, on the sync gRPC stack."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, cast

import grpc

from omni_grpc.client import events, messages
from omni_grpc.client.channel import OPTIONS, UNARY_TIMEOUT, Deadline, Reconnect, check_address
from omni_grpc.client.download import DownloadState
from omni_grpc.client.failure import from_call
from omni_grpc.client.load import LoadEvent, load_event
from omni_grpc.client.media import MediaSource, file_input, too_large, upload_messages
from omni_grpc.client.messages import AudioOptions, EditOptions, ImageOptions, VideoOptions
from omni_grpc.client.partial_artifact import PartialArtifact
from omni_grpc.client.progress import progress_display
from omni_grpc.client.result import AudioResult, ImageResult, MediaResult, VideoResult
from omni_grpc.client.stream import JobStream
from omni_grpc.client.watch import WatchState
from omni_grpc.v1.admin_pb2 import GetServerInfoRequest, GetServerInfoResponse, LoadModelRequest
from omni_grpc.v1.admin_pb2_grpc import AdminServiceStub
from omni_grpc.v1.artifact_pb2 import UploadAssetResponse
from omni_grpc.v1.artifact_pb2_grpc import ArtifactServiceStub
from omni_grpc.v1.generation_pb2_grpc import GenerationServiceStub
from omni_grpc.v1.job_pb2 import CancelJobRequest, CreateJobRequest, GetJobRequest, Job, WatchJobRequest
from omni_grpc.v1.job_pb2_grpc import JobServiceStub
from omni_grpc.v1.model_pb2 import ListModelsRequest, Model
from omni_grpc.v1.model_pb2_grpc import ModelServiceStub
from omni_grpc.v1.options_pb2 import ARTIFACT_DELIVERY_INLINE_CHUNKS, ARTIFACT_DELIVERY_REFERENCE


class Client:
    """A connection to a server; made at the first call, shared by threads.

    Every method raises the `OmniError` that the server sent, and Unavailable (SERVER_UNREACHABLE) where there is none.
    `timeout` is the caller's patience in seconds, over everything a method does; None waits as long as it takes. It is
    not a limit of the job.

    with Client("localhost:50051") as client:
        client.generate_image("a red circle", seed=7).save("out.png")
    """

    def __init__(self, address: str = "localhost:50051", *, reconnect: Reconnect | None = None) -> None:
        self.address = check_address(address)
        self._reconnect = reconnect or Reconnect()
        self._channel = grpc.insecure_channel(self.address, options=OPTIONS)
        self._generation: GenerationServiceStub = GenerationServiceStub(self._channel)
        self._jobs: JobServiceStub = JobServiceStub(self._channel)
        self._artifacts: ArtifactServiceStub = ArtifactServiceStub(self._channel)
        self._models: ModelServiceStub = ModelServiceStub(self._channel)
        self._admin: AdminServiceStub = AdminServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and every call that is still open."""
        self._channel.close()

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
        """Makes images and waits for them. `model` may be left out where the server has one.

        `progress` shows a progress bar on stderr. Ctrl-C, a `timeout` that passes and any other exception cancel the
        job on the server first.
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
        """Makes images and hands out the job's events as they happen. Returns with the first, or raises the refusal.

        Use it in a `with` block: leaving that early cancels the job.
        """
        deadline = Deadline(timeout)
        request = messages.image_request(model or self._only_model(deadline), prompt, options)
        return self._stream(self._generation.GenerateImage, request, deadline)

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
        """Makes images from images and waits for them, as `generate_image` does.

        Each image is a path, a data: URI, bytes, a picture of PIL's, what `upload` returned, or an earlier output.
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
        name = model or self._only_model(deadline)
        request = messages.edit_request(name, prompt, images, options)
        return self._stream(self._generation.EditImage, request, deadline)

    def generate_video(
        self,
        prompt: str,
        *,
        model: str | None = None,
        progress: bool = False,
        timeout: float | None = None,
        **options: Unpack[VideoOptions],
    ) -> VideoResult:
        """Makes videos and waits for them, as `generate_image` does."""
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
        name = model or self._only_model(deadline)
        request = messages.video_request(name, prompt, options)
        return self._stream(self._generation.GenerateVideo, request, deadline)

    def generate_audio(
        self,
        prompt: str,
        *,
        model: str | None = None,
        progress: bool = False,
        timeout: float | None = None,
        **options: Unpack[AudioOptions],
    ) -> AudioResult:
        """Makes sounds and waits for them, as `generate_image` does."""
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
        name = model or self._only_model(deadline)
        request = messages.audio_request(name, prompt, options)
        return self._stream(self._generation.GenerateAudio, request, deadline)

    def _stream(self, rpc: Callable[..., Any], request: Any, deadline: Deadline) -> JobStream:
        self._send_media(request, deadline)
        watch = WatchState(self._reconnect, ARTIFACT_DELIVERY_INLINE_CHUNKS)
        stream = JobStream(self, rpc(request, timeout=deadline.remaining()), watch, deadline, owner=True)
        try:
            stream.open()
        except BaseException:
            stream.close()
            raise
        return stream

    # --- jobs -------------------------------------------------------------------------------------------------------

    def create_job(self, prompt: str, *, model: str | None = None, **options: Unpack[ImageOptions]) -> Job:
        """Queues a job that outlives this client. `watch_job(job.job_id).result()` waits for its images."""
        request = messages.image_request(model or self._only_model(Deadline(UNARY_TIMEOUT)), prompt, options)
        job: Job = self._unary(self._jobs.CreateJob, CreateJobRequest(generate_image=request)).job
        return job

    def create_edit_job(
        self, prompt: str, *, images: Sequence[MediaSource], model: str | None = None, **options: Unpack[EditOptions]
    ) -> Job:
        """`create_job` for an edit."""
        deadline = Deadline(UNARY_TIMEOUT)
        request = messages.edit_request(model or self._only_model(deadline), prompt, images, options)
        self._send_media(request, deadline)
        job: Job = (self._unary(self._jobs.CreateJob, CreateJobRequest(edit_image=request))).job
        return job

    def create_video_job(self, prompt: str, *, model: str | None = None, **options: Unpack[VideoOptions]) -> Job:
        """`create_job` for a video."""
        deadline = Deadline(UNARY_TIMEOUT)
        request = messages.video_request(model or self._only_model(deadline), prompt, options)
        self._send_media(request, deadline)
        job: Job = (self._unary(self._jobs.CreateJob, CreateJobRequest(generate_video=request))).job
        return job

    def create_audio_job(self, prompt: str, *, model: str | None = None, **options: Unpack[AudioOptions]) -> Job:
        """`create_job` for a sound."""
        deadline = Deadline(UNARY_TIMEOUT)
        request = messages.audio_request(model or self._only_model(deadline), prompt, options)
        self._send_media(request, deadline)
        job: Job = (self._unary(self._jobs.CreateJob, CreateJobRequest(generate_audio=request))).job
        return job

    def get_job(self, job_id: str) -> Job:
        """The job as it stands."""
        job: Job = self._unary(self._jobs.GetJob, GetJobRequest(job_id=job_id)).job
        return job

    def list_jobs(
        self, *, states: Collection[str] = (), labels: Mapping[str, str] | None = None, limit: int = 50
    ) -> list[Job]:
        """The newest `limit` jobs, newest first. `states` ("RUNNING") keeps those in one, `labels` those with all
        of them.
        """
        request = messages.list_jobs_request(states, labels or {}, limit)
        jobs: list[Job] = []
        while len(jobs) < limit:
            page = self._unary(self._jobs.ListJobs, request)
            jobs += page.jobs
            request.page_token = page.next_page_token
            if not page.next_page_token:
                break
        return jobs[:limit]

    def watch_job(self, job_id: str, after_seq: int = 0, *, timeout: float | None = None) -> JobStream:
        """The events of a job with a seq greater than `after_seq`, then those to come, to its end."""
        deadline = Deadline(timeout)
        watch = WatchState(self._reconnect, ARTIFACT_DELIVERY_REFERENCE, job_id=job_id, after_seq=after_seq)
        return JobStream(self, self.open_watch(watch.request(), deadline), watch, deadline, owner=False)

    def cancel_job(self, job_id: str, reason: str = "", *, timeout: float = UNARY_TIMEOUT) -> Job:
        """Asks a job to stop, and returns it. A job that has ended is returned as it is."""
        request = CancelJobRequest(job_id=job_id, reason=reason)
        job: Job = self._unary(self._jobs.CancelJob, request, timeout).job
        return job

    # --- artifacts --------------------------------------------------------------------------------------------------

    def download(self, artifact_id: str, *, timeout: float | None = None) -> bytes:
        """The bytes of an artifact, checked against its SHA-256."""
        return self._fetch(DownloadState(self._reconnect, artifact_id), Deadline(timeout)).data()

    def fetch(self, parts: PartialArtifact, deadline: Deadline) -> None:
        """Fills in the bytes of an artifact that did not come along with its job's events."""
        self._fetch(DownloadState(self._reconnect, parts.artifact.artifact_id, parts), deadline)

    def upload(
        self, media: str | Path | bytes, *, mime_type: str = "", timeout: float | None = None
    ) -> UploadAssetResponse:
        """Stores media on the server, to be used in several requests. Large media are uploaded anyway."""
        given = file_input(media)
        content = upload_messages(given.data, mime_type or given.mime_type)
        try:
            stored: UploadAssetResponse = self._artifacts.UploadAsset(content, timeout=timeout)
        except grpc.RpcError as error:
            raise from_call(error, self.address).failure.error() from error
        return stored

    # --- the server -------------------------------------------------------------------------------------------------

    def list_models(self) -> list[Model]:
        """The models that the server serves, with their limits and defaults."""
        return list(self._unary(self._models.ListModels, ListModelsRequest()).models)

    def server_info(self) -> GetServerInfoResponse:
        """Version, devices and limits of the server."""
        info: GetServerInfoResponse = self._unary(self._admin.GetServerInfo, GetServerInfoRequest())
        return info

    def load_model(self, model: str | None = None, *, timeout: float | None = None) -> Iterator[LoadEvent]:
        """How far the server is with its model: Loading as often as that changes, at last ModelReady, which is the only
        event where the model is ready. Raises what keeps it from loading.

        for event in client.load_model():
            print(event)
        """
        deadline = Deadline(timeout)
        request = LoadModelRequest(model=model or self._only_model(deadline))
        call = self._admin.LoadModel(request, timeout=deadline.remaining())
        try:
            for message in call:
                yield load_event(message)
        except grpc.RpcError as error:
            raise from_call(error, self.address).failure.error() from error
        finally:
            call.cancel()

    # --- calls ------------------------------------------------------------------------------------------------------

    def open_watch(self, request: WatchJobRequest, deadline: Deadline) -> Any:
        """A WatchJob call, for streams."""
        return self._jobs.WatchJob(request, timeout=deadline.remaining())

    def _send_media(self, request: Any, deadline: Deadline) -> None:
        """Uploads the media of a request that are too large to travel inside of it."""
        for media in too_large(request):
            stored = self.upload(media.data, mime_type=media.mime_type, timeout=deadline.remaining())
            media.asset_id = stored.asset_id

    def _only_model(self, deadline: Deadline) -> str:
        timeout = deadline.within(UNARY_TIMEOUT)
        return messages.only_model(self._unary(self._models.ListModels, ListModelsRequest(), timeout).models)

    def _unary(self, rpc: Callable[..., Any], request: Any, timeout: float = UNARY_TIMEOUT) -> Any:
        try:
            return rpc(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_call(error, self.address).failure.error() from error

    def _fetch(self, download: DownloadState, deadline: Deadline) -> PartialArtifact:
        while True:
            try:
                for message in self._artifacts.DownloadArtifact(download.request(), timeout=deadline.remaining()):
                    download.accept(message)
                return download.finished()
            except grpc.RpcError as error:
                time.sleep(deadline.within(download.lost(from_call(error, self.address))))


def _follow(stream: JobStream, progress: bool) -> MediaResult:
    """The result of a job, whose progress is shown meanwhile."""
    with stream, progress_display(progress) as show:
        for event in stream:
            show(events.event(event))
        return stream.result()
