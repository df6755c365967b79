"""Profiles of what workers do: what may be asked for, and where the files are kept."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from omni_grpc.engine import Job
from omni_grpc.engine.outputs import pieces_of
from omni_grpc.engine.profiling import Profile, new_profile_id
from omni_grpc.engine.profiling import ProfileFile as Taken
from omni_grpc.fleet import Fleet, Served
from omni_grpc.gate.audit import Audit
from omni_grpc.gate.models import ModelGate
from omni_grpc.gate.refusals import Refusals, refused
from omni_grpc.gate.stored import Stored, available
from omni_grpc.store.assets import PROFILE
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import FailedPrecondition, NotFound
from omni_grpc.types.plan import ProfileFileKind, Record, RecordingEnd, SharedBytes

logger = logging.getLogger(__name__)

ACTIVITIES = ("cpu", "cuda")
DEFAULT_LIMIT, MAX_LIMIT = 60.0, 600.0
"""Seconds after which a recording ends."""
MAX_STEPS = 1000
"""Of one recording: a step of a large model is some thousand events."""
REMEMBERED = 16
"""Profiles that StopProfile still tells of."""
MIME_TYPES: Mapping[ProfileFileKind, str] = {
    ProfileFileKind.TRACE: "application/gzip",
    ProfileFileKind.OPS: "text/plain; charset=utf-8",
    ProfileFileKind.MEMORY: "application/gzip",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileAsk:
    """What is to be recorded. Names and units are those of StartProfileRequest; None is unset."""

    model: str = ""
    job_id: str = ""
    start_step: int = 0
    num_steps: int | None = None
    activities: Sequence[str] = ()
    with_stack: bool = False
    record_shapes: bool = False
    memory: bool = False
    replica: int | None = None
    all_ranks: bool = False
    time_limit: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A profile that has begun. `time_limit` in seconds."""

    profile_id: str
    model: str
    activities: Sequence[str]
    time_limit: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFile:
    """A file of a profile, which is kept as long as an upload is."""

    artifact_id: str
    kind: ProfileFileKind
    replica: int
    rank: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What was recorded."""

    files: Sequence[ProfileFile]
    steps: int
    end: RecordingEnd


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    model: Served
    profile: Profile
    kept: asyncio.Task[Profiled]


class ProfileGate:
    """Every function raises PermissionDenied for a caller who is no admin."""

    def __init__(self, fleet: Fleet, stored: Stored, models: ModelGate, audit: Audit) -> None:
        self._fleet = fleet
        self._stored = stored
        self._models = models
        self._audit = audit
        self._known: dict[str, _Known] = {}

    async def start(self, caller: Caller, ask: ProfileAsk) -> Begun:
        """Begins to record. Raises InvalidArgument for what cannot be recorded, FailedPrecondition where a profile of
        the model runs already or nothing can record, NotFound.
        """
        with self._audit.action(caller, "StartProfile", model=ask.model, job_id=ask.job_id) as line:
            caller.require(Scope.ADMIN)
            job = await self._job(caller, ask) if ask.job_id else None
            model = self._models.named(caller, job.record.model if job is not None else ask.model)
            limit = DEFAULT_LIMIT if ask.time_limit is None else ask.time_limit
            order = _order(ask, model, limit)
            line |= {"model": model.name, "profile_id": order.id}
            profile = model.running.profiling.start(order, job=job, replica=ask.replica, seconds=limit)
            kept = asyncio.create_task(self._keep(profile, caller.tenant), name=f"omni_grpc-{order.id}")
            kept.add_done_callback(lambda done: None if done.cancelled() else done.exception())
            self._known[order.id] = _Known(model, profile, kept)
            while len(self._known) > REMEMBERED and (over := next(iter(self._known))) != order.id:
                self._known.pop(over).kept.cancel()
            return Begun(profile_id=order.id, model=model.name, activities=order.activities, time_limit=limit)

    async def stop(self, caller: Caller, profile_id: str, *, wait: bool) -> Profiled:
        """Ends a profile, or with `wait` lets it end, and returns what was recorded once it is kept. Raises NotFound
        (PROFILE_NOT_FOUND), Unavailable (PROFILE_LOST), or what kept its files from being kept.
        """
        with self._audit.action(caller, "StopProfile", profile_id=profile_id):
            caller.require(Scope.ADMIN)
            if not profile_id:
                raise refused("profile_id", "is required")
            if (known := self._known.get(profile_id)) is None:
                message = f"there is no profile {profile_id!r}; this server remembers its last {REMEMBERED}"
                raise NotFound(message, reason="PROFILE_NOT_FOUND", metadata={"name": profile_id})
            if not wait and known.model.engine is not None:
                known.model.engine.profiling.stop(known.profile, RecordingEnd.STOPPED)
            return await asyncio.shield(known.kept)

    async def close(self) -> None:
        """Forgets what has not been kept."""
        tasks = [known.kept for known in self._known.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _job(self, caller: Caller, ask: ProfileAsk) -> Job:
        """A job of which something can still be recorded here."""
        job = await self._stored.job(caller, ask.job_id)
        if ask.model and ask.model != job.record.model:
            raise refused("model", f"is {ask.model!r}, and the job is of {job.record.model!r}; leave it out")
        if job.state.terminal:
            raise FailedPrecondition(f"job {job.id} is {job.state}: it takes no more steps", reason="JOB_ENDED")
        if job.id not in self._fleet.jobs:
            message = f"job {job.id} is on another server of this store; ask that one (Job.replica)"
            raise FailedPrecondition(message, reason="JOB_ELSEWHERE")
        return job

    async def _keep(self, profile: Profile, tenant: str) -> Profiled:
        files = await profile.done
        kept = []
        try:
            for file in sorted(files, key=lambda one: (one.replica, one.rank, one.kind)):
                kept.append(await self._kept(file, tenant))
        finally:
            shared.discard_all([file.data for file in files])
        assert profile.end is not None, "it has ended"
        return Profiled(files=kept, steps=profile.steps, end=profile.end)

    async def _kept(self, file: Taken, tenant: str) -> ProfileFile:
        digest = hashlib.sha256()
        with available():
            async with self._fleet.assets.reserved(file.data.size, tenant=tenant):
                asset = await self._fleet.assets.put(
                    _hashed(file.data, digest.update),
                    MIME_TYPES[file.kind],
                    sha256=digest.hexdigest,
                    tenant=tenant,
                    kind=PROFILE,
                )
        return ProfileFile(
            artifact_id=asset.id, kind=file.kind, replica=file.replica, rank=file.rank, size_bytes=asset.size_bytes
        )


def _order(ask: ProfileAsk, model: Served, limit: float) -> Record:
    """The order to the worker. Raises InvalidArgument."""
    refusals = Refusals()
    on_cpu = model.ready is not None and model.ready.device == "cpu"
    if ask.num_steps is not None:
        refusals.number("num_steps", ask.num_steps, 1, MAX_STEPS)
    if not 0 < limit <= MAX_LIMIT:
        refusals.refuse("time_limit", f"is {limit:g} s; it must be above 0, and at most {MAX_LIMIT:g} s")
    for place, name in enumerate(ask.activities):
        if name not in ACTIVITIES:
            refusals.refuse(f"activities[{place}]", f"{name!r} is not known; use one of {', '.join(ACTIVITIES)}")
        elif name == "cuda" and on_cpu:
            refusals.refuse(f"activities[{place}]", "'cuda' needs a GPU, and this model runs on a CPU; leave it out")
    if ask.memory and on_cpu:
        refusals.refuse("memory", "is of device memory, and this model runs on a CPU; leave it out")
    refusals.check()
    return Record(
        id=new_profile_id(),
        activities=tuple(dict.fromkeys(ask.activities)) or (ACTIVITIES[:1] if on_cpu else ACTIVITIES),
        job_id=ask.job_id,
        start_step=ask.start_step,
        num_steps=ask.num_steps,
        with_stack=ask.with_stack,
        record_shapes=ask.record_shapes,
        memory=ask.memory,
        all_ranks=ask.all_ranks,
    )


async def _hashed(block: SharedBytes, update: Callable[[bytes], None]) -> AsyncGenerator[bytes]:
    async for piece in pieces_of(block):
        update(piece)
        yield piece
