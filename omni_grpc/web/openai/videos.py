"""/v1/videos: jobs that make videos, made, looked at, listed, downloaded and deleted."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from omni_grpc.gate import Job, JobState, PageRequest
from omni_grpc.gate.jobs import job_place
from omni_grpc.gate.pages import MAX_SIZE
from omni_grpc.gate.refusals import Refusals, refused
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import NotFound
from omni_grpc.types.media import Modality
from omni_grpc.types.request import Task
from omni_grpc.types.request_options import VIDEO
from omni_grpc.types.results import Artifact
from omni_grpc.v1 import generation_pb2
from omni_grpc.web.files import Files
from omni_grpc.web.openai.attempts import Attempts
from omni_grpc.web.openai.body import read_body
from omni_grpc.web.openai.endpoint import Endpoints
from omni_grpc.web.openai.errors import code_of
from omni_grpc.web.openai.fields import VIDEOS
from omni_grpc.web.openai.making import Maker, attended
from omni_grpc.web.openai.reading import warnings_of

STATUS: Mapping[JobState, str] = {
    JobState.QUEUED: "queued",
    JobState.RUNNING: "in_progress",
    JobState.PREEMPTED: "in_progress",
    JobState.SUCCEEDED: "completed",
    # clients wait until it is one of two, so that there is no third end
    JobState.FAILED: "failed",
    JobState.CANCELLED: "failed",
}
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
CANCEL_SECONDS = 30.0
"""How long a deletion waits for a job to stop."""
VARIANT = "video"
COUNT = re.compile(r"[0-9]{1,4}")


class Videos:
    """A video is a job: its id is the job's."""

    def __init__(self, maker: Maker, files: Files, attempts: Attempts) -> None:
        self._maker = maker
        self._gate = maker.gate
        self._files = files
        self._attempts = attempts

    def routes(self, endpoints: Endpoints) -> Iterator[Route]:
        yield endpoints.route("POST", "videos", "JobService/CreateJob", self._create)
        yield endpoints.route("GET", "videos", "JobService/ListJobs", self._list)
        yield endpoints.route("GET", "videos/{video_id}", "JobService/GetJob", self._retrieve)
        yield endpoints.route("DELETE", "videos/{video_id}", "JobService/DeleteJob", self._delete)
        yield endpoints.route("GET", "videos/{video_id}/content", "ArtifactService/DownloadArtifact", self._content)

    async def _create(self, request: Request, caller: Caller) -> Response:
        body = await read_body(request, self._maker.most)
        reading = await self._maker.read(caller, body, VIDEO, generation_pb2.GenerateVideoRequest(), VIDEOS)

        async def create() -> dict[str, Any]:
            async with self._maker.job(request, caller, reading, waits=False) as made:
                return video(made.job) | {"warnings": made.warnings}

        return _json(await attended(request.receive, create()))

    async def _retrieve(self, request: Request, caller: Caller) -> Response:
        return _json(video(await self._job(request, caller)))

    async def _list(self, request: Request, caller: Caller) -> Response:
        limit, after = _page(request)
        asked = PageRequest()
        token = ""
        if after:
            token = asked.token_after(job_place(await self._gate.jobs.get(caller, after, action="ListJobs")))
        shown: list[Job] = []
        size = limit + 1
        while True:
            jobs, token = await self._gate.jobs.page(caller, PageRequest(size, token))
            shown += [job for job in jobs if _is_video(job)]
            if not token or len(shown) > limit:
                break
            # the others are not shown, and may be many
            size = MAX_SIZE
        data = [video(job) for job in shown[:limit]]
        content = {"object": "list", "data": data, "has_more": len(shown) > limit}
        return _json(
            content | {name: data[i]["id"] if data else None for name, i in (("first_id", 0), ("last_id", -1))}
        )

    async def _delete(self, request: Request, caller: Caller) -> Response:
        job = await self._job(request, caller)
        if not job.state.terminal:
            await self._gate.jobs.cancel(caller, job.id, "deleted by the client")
            # one that does not stop in time is not deleted: the gate refuses that
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_SECONDS), aclosing(self._gate.jobs.watch(caller, job.id)) as updates:
                    async for _ in updates:
                        pass
        await self._gate.jobs.delete(caller, job.id)
        return _json({"id": job.id, "object": "video.deleted", "deleted": True})

    async def _content(self, request: Request, caller: Caller) -> Response:
        job = await self._job(request, caller)
        variant = request.query_params.get("variant", VARIANT)
        if variant != VARIANT and not COUNT.fullmatch(variant):
            raise refused(
                "variant", f"{variant[:20]!r} is not made here; use {VARIANT}, or the number of an output from 0"
            )
        if job.state is not JobState.SUCCEEDED:
            raise _without_content(job)
        index = 0 if variant == VARIANT else int(variant)
        artifact = next((one for one in job.artifacts if one.index == index), None)
        if artifact is None:
            made = len(job.artifacts)
            raise refused("variant", f"{variant} is not there: video {job.id} has {made} outputs, from 0")
        return await self._files.sent(request, caller, artifact.artifact_id)

    async def _job(self, request: Request, caller: Caller) -> Job:
        """The video that the path names. The client knows it, so that the answer to its making has arrived."""
        job = await self._gate.jobs.get(caller, request.path_params["video_id"])
        if not _is_video(job):
            raise NotFound(f"job {job.id} makes no video", reason="JOB_NOT_FOUND", metadata={"name": job.id})
        self._attempts.received(job.record.request_id)
        return job


def video(job: Job) -> dict[str, Any]:
    """A job as OpenAI's resource. What it ended with is in it, whatever that was."""
    record, request = job.record, job.request
    artifact: Artifact | None = next(iter(job.artifacts), None)
    error = None
    if job.failure is not None:
        error = {"code": code_of(job.failure), "message": job.failure.message}
    elif job.state is JobState.CANCELLED:
        error = {"code": "job_cancelled", "message": f"job {job.id} was cancelled: {record.cancel_reason}"}
    content = {
        "id": job.id,
        "object": "video",
        "created_at": int(record.create_time),
        "completed_at": int(record.end_time) if job.state is JobState.SUCCEEDED and record.end_time else None,
        "expires_at": None if record.expire_time is None else int(record.expire_time),
        "status": STATUS[job.state],
        "progress": _progress(job),
        "model": request.model,
        "prompt": request.prompt,
        "seconds": _seconds(job, artifact),
        "size": f"{request.width}x{request.height}",
        "remixed_from_video_id": None,
        "error": error,
        "seeds": list(request.seeds),
        "warnings": warnings_of(job.warnings),
    }
    if artifact is not None:
        content |= {"media_type": artifact.mime_type, "num_frames": artifact.num_frames, "fps": artifact.fps}
    if job.stats is not None:
        content["inference_time_s"] = max(0.0, job.stats.total - job.stats.queue_wait)
    return content


def _progress(job: Job) -> int:
    """Percent: of the steps, until it is done."""
    if job.state is JobState.SUCCEEDED:
        return 100
    return min(99, 100 * job.step // max(1, job.total_steps))


def _seconds(job: Job, artifact: Artifact | None) -> str:
    """The playing time, of the file once there is one. OpenAI has it as text."""
    request = job.request
    seconds = artifact.duration if artifact is not None else request.duration or 0.0
    if not seconds and request.num_frames and (fps := request.output_fps or request.fps):
        seconds = request.num_frames / fps
    return f"{seconds:.6g}"


def _is_video(job: Job) -> bool:
    return Task(job.record.task).modality is Modality.VIDEO


def _without_content(job: Job) -> NotFound:
    shown, named = video(job), {"job_id": job.id}
    if shown["error"] is None:
        message = f"video {job.id} is {shown['status']}; poll GET /v1/videos/{job.id}"
        return NotFound(message, reason="VIDEO_NOT_READY", metadata=named)
    return NotFound(f"video {job.id} failed: {shown['error']['message']}", reason="VIDEO_FAILED", metadata=named)


def _page(request: Request) -> tuple[int, str]:
    """How many are asked for, and behind which."""
    query, refusals = request.query_params, Refusals()
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not COUNT.fullmatch(limit) or not 1 <= int(limit) <= MAX_LIMIT:
        refusals.refuse("limit", f"{limit[:20]!r} is not an integer from 1 to {MAX_LIMIT}")
    if (order := query.get("order", "desc")) != "desc":
        refusals.refuse("order", f"{order!r} is not served: the newest come first (desc)")
    for name in query.keys() - {"limit", "order", "after"}:
        refusals.refuse(name, "is unknown; use after, limit or order")
    refusals.check()
    return int(limit), query.get("after", "")


def _json(content: dict[str, Any]) -> Response:
    return JSONResponse(content, headers={"cache-control": "no-store"})
