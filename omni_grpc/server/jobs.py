"""JobService: jobs that outlive the call that made them."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from omni_grpc import wire
from omni_grpc.engine import Engine, EngineState, Job, JobState
from omni_grpc.server.changes import Changes
from omni_grpc.server.fields import Reader, refused
from omni_grpc.server.follow import check_cursor, follow
from omni_grpc.server.intake import Intake
from omni_grpc.server.merge import Merged
from omni_grpc.server.messages import Messages
from omni_grpc.server.pages import page
from omni_grpc.server.requests import JOB_STATES, read_inline
from omni_grpc.server.watch import JobWatch, Newcomers
from omni_grpc.types.errors import Unavailable
from omni_grpc.v1 import event_pb2, job_pb2, job_pb2_grpc

MAX_REASON_CHARS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class WatchOptions:
    """How a watcher wants to see a job: shortest time in seconds between progress events, and whether with previews."""

    interval: float
    previews: bool


class JobService(job_pb2_grpc.JobServiceServicer):
    """A call's status is about the call; the outcome of a job is in its record and its events."""

    def __init__(self, engine: Engine, intake: Intake, changes: Changes, messages: Messages, watch: JobWatch) -> None:
        self._engine = engine
        self._intake = intake
        self._changes = changes
        self._messages = messages
        self._watch = watch

    async def CreateJob(self, request: job_pb2.CreateJobRequest, context: Any) -> job_pb2.CreateJobResponse:
        if (arm := request.WhichOneof("task")) is None:
            raise refused("task", "is required: set one of generate_image, edit_image, generate_video, generate_audio")
        accepted = await self._intake.submit(getattr(request, arm), streaming=False)
        job, deduplicated = accepted.job, accepted.deduplicated
        if accepted.asked.submission.cancel_on_disconnect and not deduplicated:
            # nobody watches yet, so the disconnect grace runs from here on
            with self._engine.watching(job):
                pass
        return wire.build(
            job_pb2.CreateJobResponse,
            job=self._messages.job(job),
            deduplicated=deduplicated,
            warnings=job.warnings,
        )

    async def GetJob(self, request: job_pb2.GetJobRequest, context: Any) -> job_pb2.GetJobResponse:
        return job_pb2.GetJobResponse(job=self._messages.job(self._job(request.job_id)))

    async def ListJobs(self, request: job_pb2.ListJobsRequest, context: Any) -> job_pb2.ListJobsResponse:
        states = _states(request.states)
        jobs = [
            job
            for job in self._engine.jobs.newest(labels=request.label_selector)
            if (states is None or job.state in states) and request.model in ("", job.request.model)
        ]
        shown, token = page(jobs, lambda job: (job.create_time, job.id), request)
        return job_pb2.ListJobsResponse(jobs=[self._messages.job(job) for job in shown], next_page_token=token)

    async def WatchJob(
        self, request: job_pb2.WatchJobRequest, context: Any
    ) -> AsyncGenerator[job_pb2.WatchJobResponse]:
        job = self._job(request.job_id)
        reader = Reader()
        inline = read_inline("delivery", request.delivery, reader, default=False)
        interval = reader.seconds("min_progress_interval", request) or 0.0
        reader.check()
        after_seq = check_cursor(job, request.after_seq)
        events = self._watch.events(
            job, after_seq, inline=inline, interval=interval, previews=not request.omit_previews
        )
        async with aclosing(events):
            async for event in events:
                yield job_pb2.WatchJobResponse(event=event)

    async def WatchJobs(
        self, request: job_pb2.WatchJobsRequest, context: Any
    ) -> AsyncGenerator[job_pb2.WatchJobsResponse]:
        look = self._check_watch(request)
        named = [self._engine.jobs.get(job_id) for job_id in dict.fromkeys(request.job_ids)]
        cursors = {
            job_id: check_cursor(self._engine.jobs.get(job_id), after_seq)
            for job_id, after_seq in request.after_seq.items()
        }
        if strays := cursors.keys() - {job.id for job in (*named, *self._selected(request.label_selector))}:
            raise refused(
                "after_seq", f"names {', '.join(sorted(strays))}, which neither job_ids nor label_selector includes"
            )
        heartbeat = self._engine.config.server.heartbeat_interval
        async with Merged[job_pb2.WatchJobsResponse]() as merged:
            for job in named:
                merged.add(self._updates(job, cursors.get(job.id), look))
            if request.label_selector:
                newcomers = Newcomers(named)
                merged.add(self._select(request.label_selector, newcomers, cursors, look, merged))
            while True:
                try:
                    update = await merged.next(heartbeat)
                except TimeoutError:
                    update = job_pb2.WatchJobsResponse(event=self._messages.heartbeat())
                if update is None:
                    return
                yield update

    async def CancelJob(self, request: job_pb2.CancelJobRequest, context: Any) -> job_pb2.CancelJobResponse:
        reader = Reader()
        reader.text("reason", request.reason, MAX_REASON_CHARS)
        reader.check()
        job = self._engine.cancel(self._job(request.job_id).id, request.reason or "cancelled by the client")
        return job_pb2.CancelJobResponse(job=self._messages.job(job))

    async def DeleteJob(self, request: job_pb2.DeleteJobRequest, context: Any) -> job_pb2.DeleteJobResponse:
        self._engine.delete(self._job(request.job_id).id)
        return job_pb2.DeleteJobResponse()

    # --- parts ----------------------------------------------------------------------------------------------------

    def _job(self, job_id: str) -> Job:
        if not job_id:
            raise refused("job_id", "is required")
        return self._engine.jobs.get(job_id)

    def _check_watch(self, request: job_pb2.WatchJobsRequest) -> WatchOptions:
        """How the caller of a WatchJobs wants to see its jobs; its other fields are in order."""
        reader = Reader()
        if not request.job_ids and not request.label_selector:
            reader.refuse("job_ids, label_selector", "are both empty; set at least one of them")
        interval = reader.seconds("min_progress_interval", request) or 0.0
        reader.check()
        return WatchOptions(interval=interval, previews=not request.omit_previews)

    def _selected(self, labels: Mapping[str, str]) -> list[Job]:
        return self._engine.jobs.newest(labels=labels) if labels else []

    async def _updates(
        self, job: Job, after_seq: int | None, look: WatchOptions
    ) -> AsyncGenerator[job_pb2.WatchJobsResponse]:
        """The updates of one job: from a cursor on, or from a snapshot."""
        if after_seq is None:
            # taken together, so that the events go on exactly where the snapshot ends
            after_seq, snapshot = job.last_seq, self._messages.job(job)
            with self._engine.watching(job):
                yield job_pb2.WatchJobsResponse(snapshot=snapshot)
        updates = follow(self._engine, job, after_seq, interval=look.interval, heartbeat=None)
        async with aclosing(updates):
            async for update in updates:
                if update is not None:
                    event = self._messages.event(job, update, previews=look.previews)
                    yield job_pb2.WatchJobsResponse(event=event)

    async def _select(
        self,
        labels: Mapping[str, str],
        newcomers: Newcomers,
        cursors: Mapping[str, int],
        look: WatchOptions,
        merged: Merged[job_pb2.WatchJobsResponse],
    ) -> AsyncGenerator[job_pb2.WatchJobsResponse]:
        """Adds every job that has the labels to the watch, as it comes. Ends only with the server."""
        while self._engine.state is not EngineState.STOPPED:
            count = self._changes.count
            for job in newcomers.among(self._selected(labels)):
                merged.add(self._updates(job, cursors.get(job.id), look))
            await self._changes.wait(count)
        raise Unavailable("the server was stopped; watch again", reason="SERVER_STOPPED")
        yield  # never reached: it makes this a stream, like those it stands beside


def _states(values: Iterable[int]) -> set[JobState] | None:
    """The states to show, None for all. A state that the engine never enters selects nothing."""
    reader = Reader()
    names = [reader.choice("states", event_pb2.JobState, value, JOB_STATES) for value in values]
    reader.check()
    return {state for state in JobState if state.value in names} if names else None
