"""What is handed to the engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeVar

from omni_grpc.config import JobsConfig
from omni_grpc.engine.jobs import Job
from omni_grpc.engine.policy import Claim
from omni_grpc.engine.run import JobRun
from omni_grpc.resolve.request import Resolved
from omni_grpc.types.request import Draft
from omni_grpc.types.results import RequestWarning

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request and how to run its job. Times in seconds; None takes the configured one. `tenant` is whose job it is,
    `subject` who made it, within the tenant.

    `queue_timeout` runs from now until the job starts, `run_timeout` from its start to its end; both restart if the job
    is requeued. `deadline` is a time in Unix seconds that holds for all of it.
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
    warnings: tuple[RequestWarning, ...] = ()
    """What was decided for the caller before the engine saw the request."""

    @property
    def claim(self) -> Claim:
        return Claim(priority=self.priority, deadline=math.inf if self.deadline is None else self.deadline)


def new_run(
    submission: Submission,
    resolved: Resolved,
    settings: JobsConfig,
    *,
    warnings: tuple[RequestWarning, ...],
    segments: int,
) -> JobRun:
    """The job of a submission whose request was resolved, about to be queued. What is not given is as configured."""
    job = Job(
        resolved.request,
        warnings=warnings,
        segments=segments,
        priority=submission.priority,
        tenant=submission.tenant,
        subject=submission.subject,
        defaults_used=resolved.defaults_used,
        labels=submission.labels,
        request_id=submission.request_id,
        fingerprint=submission.fingerprint,
        client_job_id=submission.client_job_id,
        disconnect_grace=_or(submission.disconnect_grace, settings.disconnect_grace)
        if submission.cancel_on_disconnect
        else None,
        retention=_or(submission.retention, settings.retention),
    )
    return JobRun(
        job,
        queue_timeout=_or(submission.queue_timeout, settings.queue_timeout),
        run_timeout=_or(submission.run_timeout, settings.run_timeout),
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
