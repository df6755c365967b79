"""The asyncio client, on grpc.aio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, cast

import grpc
import grpc.aio

from omni_grpc.client import events, messages
from omni_grpc.client.async_stream import AsyncJobStream
from omni_grpc.client.channel import OPTIONS, UNARY_TIMEOUT, Deadline, Reconnect, check_address
from omni_grpc.client.download import DownloadState
from omni_grpc.client.failure import from_call
from omni_grpc.client.load import LoadEvent, load_event
from omni_grpc.client.media import MediaSource, file_input, too_large, upload_messages
from omni_grpc.client.messages import AudioOptions, EditOptions, ImageOptions, VideoOptions
from omni_grpc.client.partial_artifact import PartialArtifact
from omni_grpc.client.progress import progress_display
from omni_grpc.client.result import AudioResult, ImageResult, MediaResult, VideoResult
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

REFUSED_WHILE_SENDING, UPLOAD_ATTEMPTS = "Internal error from Core", 5
"""What grpc.aio makes of a refusal that comes while it sends: the server's own words are lost with it, so the upload is
made again to hear them.
"""


class AsyncClient:
    """`Client` for asyncio: the same methods and errors. Make it inside the event loop that it is used in.

    async with AsyncClient("localhost:50051") as client:
        result = await client.generate_image("a red circle", seed=7)
    """

    def __init__(self, address: str = "localhost:50051", *, reconnect: Reconnect | None = None) -> None:
        asyncio.get_running_loop()  # raises where there is none, which grpc.aio would only notice much later
        self.address = check_address(address)
        self._reconnect = reconnect or Reconnect()
        self._channel = grpc.aio.insecure_channel(self.address, options=OPTIONS)
        self._generation: GenerationServiceStub = GenerationServiceStub(self._channel)
        self._jobs: JobServiceStub = JobServiceStub(self._channel)
        self._artifacts: ArtifactServiceStub = ArtifactServiceStub(self._channel)
        self._models: ModelServiceStub = ModelServiceStub(self._channel)
        self._admin: AdminServiceStub = AdminServiceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection, and every call that is still open."""
        await self._channel.close()

    # --- generation -------------------------------------------------------------------------------------------------

    async def generate_image(
        self,
        prompt: str,
        *,
        model: str | None = None,
        progress: bool = False,
        timeout: float | None = None,
        **options: Unpack[ImageOptions],
    ) -> ImageResult:
        """Makes images and waits for them. `model` may be left out where the server has one.

        `progress` shows a progress bar on stderr. Cancelling the task, a `timeout` that passes and any other exception
        cancel the job on the server first.
        """
        stream = await self.stream(prompt, model=model, timeout=timeout, **options)
        return cast(ImageResult, await _follow(stream, progress))

    async def stream(
        self,
        prompt: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[ImageOptions],
    ) -> AsyncJobStream:
        """Makes images and hands out the job's events as they happen. Returns with the first, or raises the refusal.

        Use it as `async with await client.stream(...) as stream`: leaving that early cancels the job.
        """
        deadline = Deadline(timeout)
        request = messages.image_request(model or await self._only_model(deadline), prompt, options)
        return await self._stream(self._generation.GenerateImage, request, deadline)

    async def edit_image(
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
        stream = await self.stream_edit(prompt, images=images, model=model, timeout=timeout, **options)
        return cast(ImageResult, await _follow(stream, progress))

    async def stream_edit(
        self,
        prompt: str,
        *,
        images: Sequence[MediaSource],
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[EditOptions],
    ) -> AsyncJobStream:
        """The events of `edit_image` as they happen, see `stream`."""
        deadline = Deadline(timeout)
        name = model or await self._only_model(deadline)
        request = messages.edit_request(name, prompt, images, options)
        return await self._stream(self._generation.EditImage, request, deadline)

    async def generate_video(
        self,
        prompt: str,
        *,
        model: str | None = None,
        progress: bool = False,
        timeout: float | None = None,
        **options: Unpack[VideoOptions],
    ) -> VideoResult:
        """Makes videos and waits for them, as `generate_image` does."""
        stream = await self.stream_video(prompt, model=model, timeout=timeout, **options)
        return cast(VideoResult, await _follow(stream, progress))

    async def stream_video(
        self,
        prompt: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[VideoOptions],
    ) -> AsyncJobStream:
        """The events of `generate_video` as they happen, see `stream`."""
        deadline = Deadline(timeout)
        name = model or await self._only_model(deadline)
        request = messages.video_request(name, prompt, options)
        return await self._stream(self._generation.GenerateVideo, request, deadline)

    async def generate_audio(
        self,
        prompt: str,
        *,
        model: str | None = None,
        progress: bool = False,
        timeout: float | None = None,
        **options: Unpack[AudioOptions],
    ) -> AudioResult:
        """Makes sounds and waits for them, as `generate_image` does."""
        stream = await self.stream_audio(prompt, model=model, timeout=timeout, **options)
        return cast(AudioResult, await _follow(stream, progress))

    async def stream_audio(
        self,
        prompt: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **options: Unpack[AudioOptions],
    ) -> AsyncJobStream:
        """The events of `generate_audio` as they happen, see `stream`."""
        deadline = Deadline(timeout)
        name = model or await self._only_model(deadline)
        request = messages.audio_request(name, prompt, options)
        return await self._stream(self._generation.GenerateAudio, request, deadline)

    async def _stream(self, rpc: Callable[..., Any], request: Any, deadline: Deadline) -> AsyncJobStream:
        await self._send_media(request, deadline)
        watch = WatchState(self._reconnect, ARTIFACT_DELIVERY_INLINE_CHUNKS)
        stream = AsyncJobStream(self, rpc(request, timeout=deadline.remaining()), watch, deadline, owner=True)
        try:
            await stream.open()
        except BaseException:
            await stream.close()
            raise
        return stream

    # --- jobs -------------------------------------------------------------------------------------------------------

    async def create_job(self, prompt: str, *, model: str | None = None, **options: Unpack[ImageOptions]) -> Job:
        """Queues a job that outlives this client. `await watch_job(job.job_id).result()` waits for its images."""
        name = model or await self._only_model(Deadline(UNARY_TIMEOUT))
        request = messages.image_request(name, prompt, options)
        job: Job = (await self._unary(self._jobs.CreateJob, CreateJobRequest(generate_image=request))).job
        return job

    async def create_edit_job(
        self, prompt: str, *, images: Sequence[MediaSource], model: str | None = None, **options: Unpack[EditOptions]
    ) -> Job:
        """`create_job` for an edit."""
        deadline = Deadline(UNARY_TIMEOUT)
        request = messages.edit_request(model or await self._only_model(deadline), prompt, images, options)
        await self._send_media(request, deadline)
        job: Job = (await self._unary(self._jobs.CreateJob, CreateJobRequest(edit_image=request))).job
        return job

    async def create_video_job(self, prompt: str, *, model: str | None = None, **options: Unpack[VideoOptions]) -> Job:
        """`create_job` for a video."""
        deadline = Deadline(UNARY_TIMEOUT)
        request = messages.video_request(model or await self._only_model(deadline), prompt, options)
        await self._send_media(request, deadline)
        job: Job = (await self._unary(self._jobs.CreateJob, CreateJobRequest(generate_video=request))).job
        return job

    async def create_audio_job(self, prompt: str, *, model: str | None = None, **options: Unpack[AudioOptions]) -> Job:
        """`create_job` for a sound."""
        deadline = Deadline(UNARY_TIMEOUT)
        request = messages.audio_request(model or await self._only_model(deadline), prompt, options)
        await self._send_media(request, deadline)
        job: Job = (await self._unary(self._jobs.CreateJob, CreateJobRequest(generate_audio=request))).job
        return job

    async def get_job(self, job_id: str) -> Job:
        """The job as it stands."""
        job: Job = (await self._unary(self._jobs.GetJob, GetJobRequest(job_id=job_id))).job
        return job

    async def list_jobs(
        self, *, states: Collection[str] = (), labels: Mapping[str, str] | None = None, limit: int = 50
    ) -> list[Job]:
        """The newest `limit` jobs, newest first. `states` ("RUNNING") keeps those in one, `labels` those with all
        of them.
        """
        request = messages.list_jobs_request(states, labels or {}, limit)
        jobs: list[Job] = []
        while len(jobs) < limit:
            page = await self._unary(self._jobs.ListJobs, request)
            jobs += page.jobs
            request.page_token = page.next_page_token
            if not page.next_page_token:
                break
        return jobs[:limit]

    def watch_job(self, job_id: str, after_seq: int = 0, *, timeout: float | None = None) -> AsyncJobStream:
        """The events of a job with a seq greater than `after_seq`, then those to come, to its end."""
        deadline = Deadline(timeout)
        watch = WatchState(self._reconnect, ARTIFACT_DELIVERY_REFERENCE, job_id=job_id, after_seq=after_seq)
        return AsyncJobStream(self, self.open_watch(watch.request(), deadline), watch, deadline, owner=False)

    async def cancel_job(self, job_id: str, reason: str = "", *, timeout: float = UNARY_TIMEOUT) -> Job:
        """Asks a job to stop, and returns it. A job that has ended is returned as it is."""
        request = CancelJobRequest(job_id=job_id, reason=reason)
        job: Job = (await self._unary(self._jobs.CancelJob, request, timeout)).job
        return job

    # --- artifacts --------------------------------------------------------------------------------------------------

    async def download(self, artifact_id: str, *, timeout: float | None = None) -> bytes:
        """The bytes of an artifact, checked against its SHA-256."""
        return (await self._fetch(DownloadState(self._reconnect, artifact_id), Deadline(timeout))).data()

    async def fetch(self, parts: PartialArtifact, deadline: Deadline) -> None:
        """Fills in the bytes of an artifact that did not come along with its job's events."""
        await self._fetch(DownloadState(self._reconnect, parts.artifact.artifact_id, parts), deadline)

    async def upload(
        self, media: str | Path | bytes, *, mime_type: str = "", timeout: float | None = None
    ) -> UploadAssetResponse:
        """Stores media on the server, to be used in several requests. Large media are uploaded anyway."""
        given, deadline, attempt = file_input(media), Deadline(timeout), 1
        while True:
            sent = upload_messages(given.data, mime_type or given.mime_type)
            try:
                stored: UploadAssetResponse = await self._artifacts.UploadAsset(sent, timeout=deadline.remaining())
                return stored
            except grpc.RpcError as error:
                if error.details() != REFUSED_WHILE_SENDING or attempt == UPLOAD_ATTEMPTS:
                    raise from_call(error, self.address).failure.error() from error
            attempt += 1

    # --- the server -------------------------------------------------------------------------------------------------

    async def list_models(self) -> list[Model]:
        """The models that the server serves, with their limits and defaults."""
        return list((await self._unary(self._models.ListModels, ListModelsRequest())).models)

    async def server_info(self) -> GetServerInfoResponse:
        """Version, devices and limits of the server."""
        info: GetServerInfoResponse = await self._unary(self._admin.GetServerInfo, GetServerInfoRequest())
        return info

    async def load_model(
        self, model: str | None = None, *, timeout: float | None = None
    ) -> AsyncGenerator[LoadEvent, None]:
        """How far the server is with its model: Loading as often as that changes, at last ModelReady, which is the only
        event where the model is ready. Raises what keeps it from loading.

        async for event in client.load_model():
            print(event)
        """
        deadline = Deadline(timeout)
        request = LoadModelRequest(model=model or await self._only_model(deadline))
        call = self._admin.LoadModel(request, timeout=deadline.remaining())
        try:
            async for message in call:
                yield load_event(message)
        except grpc.RpcError as error:
            raise from_call(error, self.address).failure.error() from error
        finally:
            call.cancel()

    # --- calls ------------------------------------------------------------------------------------------------------

    def open_watch(self, request: WatchJobRequest, deadline: Deadline) -> Any:
        """A WatchJob call, for streams."""
        return self._jobs.WatchJob(request, timeout=deadline.remaining())

    async def _send_media(self, request: Any, deadline: Deadline) -> None:
        """Uploads the media of a request that are too large to travel inside of it."""
        for media in too_large(request):
            stored = await self.upload(media.data, mime_type=media.mime_type, timeout=deadline.remaining())
            media.asset_id = stored.asset_id

    async def _only_model(self, deadline: Deadline) -> str:
        timeout = deadline.within(UNARY_TIMEOUT)
        return messages.only_model((await self._unary(self._models.ListModels, ListModelsRequest(), timeout)).models)

    async def _unary(self, rpc: Callable[..., Any], request: Any, timeout: float = UNARY_TIMEOUT) -> Any:
        try:
            return await rpc(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_call(error, self.address).failure.error() from error

    async def _fetch(self, download: DownloadState, deadline: Deadline) -> PartialArtifact:
        while True:
            try:
                async for message in self._artifacts.DownloadArtifact(download.request(), timeout=deadline.remaining()):
                    download.accept(message)
                return download.finished()
            except grpc.RpcError as error:
                await asyncio.sleep(deadline.within(download.lost(from_call(error, self.address))))


async def _follow(stream: AsyncJobStream, progress: bool) -> MediaResult:
    """The result of a job, whose progress is shown meanwhile."""
    async with stream:
        with progress_display(progress) as show:
            async for event in stream:
                show(events.event(event))
            return await stream.result()
