"""JobService: jobs that outlive the call that made them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from omni_grpc import wire
from omni_grpc.gate import Delivery, Gate, JobState, Shown, Watch
from omni_grpc.gate.jobs import job_place
from omni_grpc.gate.refusals import refused
from omni_grpc.server.fields import Reader
from omni_grpc.server.intake import submit
from omni_grpc.server.messages import Messages
from omni_grpc.server.pages import asked_page
from omni_grpc.server.requests import JOB_STATES, read_delivery
from omni_grpc.server.watch import JobWatch
from omni_grpc.types.caller import Caller
from omni_grpc.v1 import event_pb2, job_pb2, job_pb2_grpc

MAX_PAGE_BYTES = 3 << 20
"""Of the jobs of a page, if they are several: a client takes 4 MiB unless it is told otherwise, and the labels and
warnings of a job may be long.
"""


class JobService(job_pb2_grpc.JobServiceServicer):
    """A call's status is about the call; the outcome of a job is in its record and its events."""

    def __init__(self, gate: Gate, messages: Messages, watch: JobWatch) -> None:
        self._gate = gate
        self._messages = messages
        self._watch = watch

    async def CreateJob(self, request: job_pb2.CreateJobRequest, caller: Caller) -> job_pb2.CreateJobResponse:
        if (arm := request.WhichOneof("task")) is None:
            raise refused("task", "is required: set one of generate_image, edit_image, generate_video, generate_audio")
        accepted = await submit(self._gate, caller, getattr(request, arm), streaming=False)
        return wire.build(
            job_pb2.CreateJobResponse,
            job=await self._messages.whole_job(accepted.job),
            deduplicated=accepted.deduplicated,
            warnings=accepted.job.warnings,
        )

    async def GetJob(self, request: job_pb2.GetJobRequest, caller: Caller) -> job_pb2.GetJobResponse:
        return job_pb2.GetJobResponse(
            job=await self._messages.whole_job(await self._gate.jobs.get(caller, request.job_id))
        )

    async def ListJobs(self, request: job_pb2.ListJobsRequest, caller: Caller) -> job_pb2.ListJobsResponse:
        reader = Reader()
        created_from = reader.moment("created_from", request)
        created_before = reader.moment("created_before", request)
        reader.check()
        asked = asked_page(request)
        shown, token = await self._gate.jobs.page(
            caller,
            asked,
            states=_states(request.states),
            model=request.model,
            labels=request.label_selector,
            created_from=created_from,
            created_before=created_before,
            tenant=request.tenant,
        )
        page = job_pb2.ListJobsResponse(next_page_token=token)
        size = 0
        for i, job in enumerate(shown):
            message = await self._messages.whole_job(job)
            size += message.ByteSize()
            if i and size > MAX_PAGE_BYTES:
                page.next_page_token = asked.token_after(job_place(shown[i - 1]))
                break
            page.jobs.append(message)
        return page

    async def WatchJob(
        self, request: job_pb2.WatchJobRequest, caller: Caller
    ) -> AsyncGenerator[job_pb2.WatchJobResponse]:
        reader = Reader()
        delivery = read_delivery("delivery", request.delivery, reader) or Delivery.REFERENCE
        interval = reader.seconds("min_progress_interval", request) or 0.0
        reader.check()
        self._gate.intake.check_delivery("delivery", delivery)
        events = self._watch.events(
            caller,
            request.job_id,
            request.after_seq,
            delivery=delivery,
            interval=interval,
            previews=not request.omit_previews,
        )
        async with aclosing(events):
            async for event in events:
                yield job_pb2.WatchJobResponse(event=event)

    async def WatchJobs(
        self, request: job_pb2.WatchJobsRequest, caller: Caller
    ) -> AsyncGenerator[job_pb2.WatchJobsResponse]:
        reader = Reader()
        interval = reader.seconds("min_progress_interval", request) or 0.0
        reader.check()
        watch = Watch(
            job_ids=request.job_ids,
            labels=dict(request.label_selector),
            after_seq=dict(request.after_seq),
            interval=interval,
        )
        messages, previews = self._messages, not request.omit_previews
        shown = Shown(
            snapshot=lambda job: job_pb2.WatchJobsResponse(snapshot=messages.job(job)),
            update=lambda job, update: job_pb2.WatchJobsResponse(event=messages.event(job, update, previews=previews)),
            heartbeat=lambda: job_pb2.WatchJobsResponse(event=messages.heartbeat()),
        )
        updates = self._gate.jobs.watch_many(caller, watch, shown)
        async with aclosing(updates):
            async for update in updates:
                yield update

    async def CancelJob(self, request: job_pb2.CancelJobRequest, caller: Caller) -> job_pb2.CancelJobResponse:
        job = await self._gate.jobs.cancel(caller, request.job_id, request.reason)
        return job_pb2.CancelJobResponse(job=self._messages.job(job))

    async def DeleteJob(self, request: job_pb2.DeleteJobRequest, caller: Caller) -> job_pb2.DeleteJobResponse:
        await self._gate.jobs.delete(caller, request.job_id)
        return job_pb2.DeleteJobResponse()


def _states(values: Iterable[int]) -> set[JobState] | None:
    """The states to show, None for all. A state that the engine never enters selects nothing."""
    reader = Reader()
    names = [reader.choice("states", event_pb2.JobState, value, JOB_STATES) for value in values]
    reader.check()
    return {state for state in JobState if state.value in names} if names else None
