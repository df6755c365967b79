"""What is handed to the engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeVar

from omni_grpc.config import EngineConfig
from omni_grpc.engine.policy import Claim
from omni_grpc.engine.run import JobRun
from omni_grpc.resolve.request import Resolved
from omni_grpc.store.job import Job, new_record
from omni_grpc.store.records import JobRecord, JobSpec, KeptInput, Webhook
from omni_grpc.types.media import Inputs
from omni_grpc.types.request import Draft
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.trace import TraceContext

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request and how to run its job. Times in seconds; None takes the configured one. `tenant` is whose job it is,
    `subject` who made it, within the tenant.

    `queue_timeout` runs from now until the job starts, `run_timeout` from its start to its end; both restart if the job
    is requeued. `deadline` is a time in Unix seconds that holds for all of it. `requeue`: if the server is lost while
    it runs, it is queued again. `kept_inputs`: its inputs as they were sent, which the next server would need.
    `trace`: the call that it comes with.
    """

    draft: Draft
    tenant: str = ""
    subject: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    request_id: str = ""
    fingerprint: bytes = b""
    client_job_id: str = ""
    priority: int = 0
    queue_timeout: float | None = None
    run_timeout: float | None = None
    deadline: float | None = None
    retention: float | None = None
    cancel_on_disconnect: bool = False
    disconnect_grace: float | None = None
    requeue: bool = False
    webhook: Webhook | None = None
    trace: TraceContext | None = None
    kept_inputs: tuple[KeptInput, ...] = ()
    warnings: tuple[RequestWarning, ...] = ()
    """What was decided for the caller before the engine saw the request."""


def new_run(
    submission: Submission,
    resolved: Resolved,
    config: EngineConfig,
    *,
    warnings: tuple[RequestWarning, ...],
    segments: int,
) -> JobRun:
    """The job of a submission whose request was resolved, about to be queued. What is not given is as configured."""
    settings = config.jobs
    spec = JobSpec(
        request=dataclasses.replace(resolved.request, inputs=Inputs()),
        segments=segments,
        warnings=warnings,
        defaults_used=resolved.defaults_used,
        disconnect_grace=_or(submission.disconnect_grace, settings.disconnect_grace)
        if submission.cancel_on_disconnect
        else None,
        retention=_or(submission.retention, config.keeping.retention),
        queue_timeout=_or(submission.queue_timeout, settings.queue_timeout),
        run_timeout=_or(submission.run_timeout, settings.run_timeout),
        deadline=submission.deadline,
        requeue=submission.requeue,
        inputs=submission.kept_inputs,
        webhook=submission.webhook,
        trace=submission.trace,
    )
    job = Job(
        new_record(
            spec,
            tenant=submission.tenant,
            subject=submission.subject,
            priority=submission.priority,
            request_id=submission.request_id,
            fingerprint=submission.fingerprint,
            client_job_id=submission.client_job_id,
            labels=submission.labels,
        )
    )
    job.request = resolved.request
    return JobRun(job)


def claim_of(record: JobRecord) -> Claim:
    """What a job claims of the queue."""
    deadline = record.spec.deadline
    return Claim(priority=record.priority, deadline=math.inf if deadline is None else deadline)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
