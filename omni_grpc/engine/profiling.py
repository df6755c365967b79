"""Profiles of a model's workers: which of them record, what ends that, and what has come of it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Callable, Sequence

from omni_grpc.engine.replica import Replica, ReplicaState
from omni_grpc.engine.timers import Timers
from omni_grpc.store.job import Job
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, FailedPrecondition, Failure, NotFound, Unavailable
from omni_grpc.types.plan import EndRecording, ProfileFileKind, Record, Recorded, RecordingEnd, SharedBytes

logger = logging.getLogger(__name__)

PREFIX = "prf_"
OWNER = "profile"
"""Owner of the timer of its time limit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFile:
    """A file of a profile, whose bytes are whoever's that has it: see `shared_memory`."""

    kind: ProfileFileKind
    replica: int
    rank: int
    data: SharedBytes


@dataclasses.dataclass(slots=True)
class Profile:
    """One profile of a model. `pending`: how many ranks of each replica have still to report. `done` has its files once
    all have, or raises what they were lost with.
    """

    order: Record
    job: Job | None
    pending: dict[int, int]
    done: asyncio.Future[Sequence[ProfileFile]]
    steps: int = 0
    end: RecordingEnd | None = None
    files: list[ProfileFile] = dataclasses.field(default_factory=list)
    failure: Failure | None = None

    @property
    def id(self) -> str:
        return self.order.id


def new_profile_id() -> str:
    return PREFIX + secrets.token_hex(13)


class Profiling:
    """At most one profile at a time, of one engine. `take` takes blocks out of the reach of whoever cleans up after
    their worker.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        ranks: int,
        timers: Timers,
        take: Callable[[Sequence[SharedBytes]], Sequence[SharedBytes]],
    ) -> None:
        self._replicas = replicas
        self._ranks = ranks
        self._timers = timers
        self._take = take
        self.current: Profile | None = None

    def start(self, order: Record, *, job: Job | None, replica: int | None, seconds: float) -> Profile:
        """Has a replica record: `replica`, or the one that has the job, or the first that is ready. Where a job waits,
        all of them do, until one has it. Raises FailedPrecondition (PROFILE_RUNNING, REPLICA_NOT_READY), NotFound
        (REPLICA_NOT_FOUND) and Unavailable (WORKER_DIED).
        """
        if self.current is not None:
            message = f"profile {self.current.id} of this model is running; end it with StopProfile, or wait"
            raise FailedPrecondition(message, reason="PROFILE_RUNNING", metadata={"profile_id": self.current.id})
        chosen = self._chosen(job, replica)
        ranks = self._ranks if order.all_ranks else 1
        profile = Profile(order, job, {one.number: ranks for one in chosen}, asyncio.get_running_loop().create_future())
        # whoever asks for it sees the error; where nobody does, it has been logged
        profile.done.add_done_callback(lambda done: done.exception())
        for number, one in enumerate(chosen):
            try:
                one.executor.order(order)
            except Unavailable:
                for earlier in chosen[:number]:
                    self._tell(earlier, EndRecording(id=order.id, end=RecordingEnd.STOPPED))
                raise
        self.current = profile
        self._timers.set(OWNER, order.id, seconds, lambda *_: self.stop(profile, RecordingEnd.TIME_LIMIT))
        return profile

    def stop(self, profile: Profile, end: RecordingEnd) -> None:
        """Ends a profile, if it has not ended. Its files follow."""
        if self.current is not profile:
            return
        profile.end = profile.end or end
        for one in self._replicas:
            if one.number in profile.pending:
                self._tell(one, EndRecording(id=profile.id, end=end))

    def on_recorded(self, replica: Replica, report: Recorded) -> None:
        """A rank has ended what it recorded."""
        profile = self.current
        blocks = [file.data for file in report.files]
        if profile is None or profile.id != report.id or replica.number not in profile.pending:
            shared.discard_all(blocks)
            return
        taken = self._take(blocks)
        profile.files += [
            ProfileFile(kind=file.kind, replica=replica.number, rank=report.rank, data=data)
            for file, data in zip(report.files, taken, strict=True)
        ]
        if report.steps >= profile.steps:
            profile.steps, profile.end = report.steps, report.end
        profile.failure = profile.failure or report.failure
        self._passed(replica, profile, 1)
        if report.steps or report.failure is not None:
            # one replica has the job: the others have nothing to wait for
            self.stop(profile, report.end)

    def lost(self, replica: Replica, failure: Failure) -> None:
        """The worker of a replica is gone, and with it what it recorded."""
        profile = self.current
        if profile is not None and (ranks := profile.pending.get(replica.number)):
            message = f"the profile was lost with its worker: {failure.message}"
            profile.failure = Failure(code=Code.UNAVAILABLE, reason="PROFILE_LOST", message=message)
            self._passed(replica, profile, ranks)
            self.stop(profile, RecordingEnd.STOPPED)

    def job_ended(self, job: Job) -> None:
        """A job has ended, and with it a profile of it."""
        if self.current is not None and self.current.job is job:
            self.stop(self.current, RecordingEnd.JOB_ENDED)

    def _passed(self, replica: Replica, profile: Profile, ranks: int) -> None:
        profile.pending[replica.number] -= ranks
        if profile.pending[replica.number] <= 0:
            del profile.pending[replica.number]
        if profile.pending:
            return
        self.current = None
        self._timers.clear(OWNER, profile.id)
        if profile.failure is not None:
            logger.warning("profile %s: %s", profile.id, profile.failure.message)
        if profile.failure is not None and not profile.files:
            profile.done.set_exception(profile.failure.error())
        else:
            profile.done.set_result(profile.files)

    def _chosen(self, job: Job | None, number: int | None) -> Sequence[Replica]:
        if number is not None:
            if not 0 <= number < len(self._replicas):
                message = f"there is no replica {number}: they are 0 to {len(self._replicas) - 1}"
                raise NotFound(message, reason="REPLICA_NOT_FOUND")
            chosen = [self._replicas[number]]
        else:
            having = [one for one in self._replicas if job is not None and one.scheduler.has(job.id)]
            ready = [one for one in self._replicas if one.open]
            chosen = having or (ready if job is not None else ready[:1])
        if not chosen or not all(one.open for one in chosen):
            state = chosen[0].state if chosen else self._replicas[0].state
            message = f"no worker is ready to record: {state}, not {ReplicaState.READY}"
            raise FailedPrecondition(message, reason="REPLICA_NOT_READY")
        return chosen

    def _tell(self, replica: Replica, order: EndRecording) -> None:
        try:
            replica.executor.order(order)
        except Unavailable as error:
            # its end is on its way, and is that of the profile
            logger.info("a worker that recorded is gone: %s", error)
