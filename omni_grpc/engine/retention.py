"""How long finished jobs and their outputs are kept."""

from __future__ import annotations

import contextlib
import time

from omni_grpc.engine.artifacts import Artifacts
from omni_grpc.engine.jobs import Job, Jobs
from omni_grpc.engine.timers import Timers
from omni_grpc.store.records import Cause
from omni_grpc.types.errors import NotFound

WATCHED_RETENTION = 5.0
"""Seconds after which an expired job that is still being read is looked at again."""


class Retention:
    """Forgets jobs when their time is up, and earlier while outputs take more than `budget` bytes: then the oldest of
    the tenant that holds the most, so that no tenant's outputs drive out those of others.
    """

    def __init__(self, jobs: Jobs, artifacts: Artifacts, timers: Timers, budget: int) -> None:
        self._jobs = jobs
        self._artifacts = artifacts
        self._timers = timers
        self._budget = budget

    def keep(self, job: Job) -> None:
        """A job has ended: its time runs from now on."""
        job.expire_time = time.time() + job.retention
        self._timers.set(job.id, "retention", job.retention, self._expire)
        while self._artifacts.size_bytes > self._budget:
            unread = [finished for finished in self._jobs.finished() if finished.artifacts and not finished.watchers]
            if not unread:
                return
            # the first of those that hold the most is the oldest of them
            self.forget(max(unread, key=lambda finished: self._artifacts.artifact_bytes(finished.tenant)))

    def forget(self, job: Job, cause: Cause = Cause.EXPIRED) -> None:
        """Removes a job with its events and outputs."""
        self._timers.clear_all(job.id)
        for artifact in job.artifacts:
            with contextlib.suppress(NotFound):
                self._artifacts.delete(artifact.artifact_id, cause)
        self._jobs.remove(job, cause)

    def _expire(self, job_id: str, limit: str, seconds: float) -> None:
        job = self._jobs.get(job_id)
        if job.watchers:
            self._timers.set(job_id, "retention", WATCHED_RETENTION, self._expire)
        else:
            self.forget(job)
