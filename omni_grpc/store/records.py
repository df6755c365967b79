"""What is kept of jobs, outputs and uploads. Plain frozen data: the same in memory and in a database."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping

from omni_grpc.types.events import Event
from omni_grpc.types.request import Request
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.trace import TraceContext


class JobState(enum.StrEnum):
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"

    @property
    def terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Cause(enum.StrEnum):
    """Why there is no such thing. A name that is UNKNOWN belongs to another tenant or another store, or went very long
    ago.
    """

    EXPIRED = "EXPIRED"
    DELETED = "DELETED"
    UNKNOWN = "UNKNOWN"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many rows a store has, those of other servers included; `owed` are webhooks still to be delivered."""

    jobs: int = 0
    artifacts: int = 0
    assets: int = 0
    owed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One event with its place in the log (from 1) and its time in Unix seconds."""

    seq: int
    time: float
    event: Event


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptInput:
    """A medium of a request as it was sent: its bytes, or with `as_uri` its `data:` URI, are the blob `blob`. `path` is
    its place in the request, `name` the field of Inputs that it goes to (`field_of`).
    """

    blob: str
    path: str
    name: str
    mime_type: str = ""
    as_uri: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """Who is told of a job's states by POST, and under which secret's name the body is signed. `states`: those that
    are told of.
    """

    url: str
    secret_name: str = ""
    states: tuple[JobState, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """How a job is to be run, as it was accepted: it does not change. Times in seconds; None: no limit.

    `request` is without its inputs. `disconnect_grace`: how long it may be without a watcher, None for one that
    outlives them. `deadline` is in Unix seconds. `requeue`: if its server is lost while it runs, it is queued again,
    else it fails.
    """

    request: Request
    segments: int = 1
    warnings: tuple[RequestWarning, ...] = ()
    defaults_used: Mapping[str, str] = dataclasses.field(default_factory=dict)
    disconnect_grace: float | None = None
    retention: float = 600.0
    queue_timeout: float | None = None
    run_timeout: float | None = None
    deadline: float | None = None
    requeue: bool = False
    inputs: tuple[KeptInput, ...] = ()
    webhook: Webhook | None = None
    trace: TraceContext | None = None
    """The call that made it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job without its log. Times in Unix seconds.

    `server` is the one that has it. `reserved_seq`: no event with a greater seq was ever seen, so that a log that goes
    on after a restart repeats none. `restarts` counts the servers that it was lost with. `cancel_reason` is what
    somebody asked to stop it for; None: nobody did.
    """

    id: str
    spec: JobSpec
    model: str
    task: str
    state: JobState
    create_time: float
    tenant: str = ""
    subject: str = ""
    start_time: float | None = None
    end_time: float | None = None
    expire_time: float | None = None
    priority: int = 0
    request_id: str = ""
    fingerprint: bytes = b""
    client_job_id: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    server: str = ""
    reserved_seq: int = 0
    restarts: int = 0
    cancel_reason: str | None = None

    @property
    def trace(self) -> TraceContext | None:
        """The span of this job; None where it belongs to no trace."""
        made = self.spec.trace
        return None if made is None else made.child(self.id)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRow:
    """An output whose bytes are there: the blob of this name. What it is stands in its job's log."""

    artifact_id: str
    job_id: str
    tenant: str
    size_bytes: int
    create_time: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One uploaded file without its bytes, which are the blob of its id. `sha256` is hex; times in Unix seconds."""

    id: str
    mime_type: str
    size_bytes: int
    sha256: str
    create_time: float
    expire_time: float
    tenant: str = ""


class AdapterSource(enum.StrEnum):
    """Where the file of an adapter came from."""

    PATH = "PATH"
    HUB = "HUB"
    ASSET = "ASSET"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRow:
    """A LoRA adapter that was loaded while a server ran, and is loaded again by every server that has its model.

    `uid` names this load: no other one has it, of the same id neither. `place` is the path, the hub's repository at a
    commit (`org/name@commit`) or the id of the upload, `filename` the file within it. `format` is the layout that was
    asked for, "" for any. `tenant` and `subject` are whose call loaded it. `create_time` in Unix seconds.
    """

    model: str
    lora_id: str
    uid: str
    source: AdapterSource
    place: str
    filename: str
    sha256: str
    size_bytes: int
    format: str
    pinned: bool
    create_time: float
    tenant: str = ""
    subject: str = ""


class Outcome(enum.StrEnum):
    """What became of a delivery."""

    PENDING = "PENDING"
    DELIVERED = "DELIVERED"
    GIVEN_UP = "GIVEN_UP"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One call of a webhook: that a job has entered a state. `id` is the same at each attempt and on every server.
    Times in Unix seconds.

    `host` is that of the URL: hosts take turns. `body` is what is sent, the job as it was at `create_time`; nothing is
    left of it after the end. `due`: when the next attempt may be made. `attempts` have been made, the last of which
    failed for `last_error`. `trace` is the span of the job.
    """

    id: str
    job_id: str
    tenant: str
    state: JobState
    url: str
    host: str
    secret_name: str
    body: bytes
    create_time: float
    due: float
    attempts: int = 0
    last_error: str = ""
    outcome: Outcome = Outcome.PENDING
    end_time: float | None = None
    trace: TraceContext | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class StoredJob:
    """A job with the kept part of its log, in order of seq."""

    record: JobRecord
    entries: tuple[Entry, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobWrite:
    """What is new of a job. The record replaces the one before it; `created`: there is none yet. All of it is committed
    together, or none.
    """

    record: JobRecord
    entries: tuple[Entry, ...] = ()
    artifacts: tuple[ArtifactRow, ...] = ()
    deliveries: tuple[Delivery, ...] = ()
    created: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """What was not written of a batch. `taken`: new jobs whose request_id another job of their tenant has already, with
    that job's id. `lost`: jobs that another server has taken over.
    """

    taken: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lost: Collection[str] = ()


Position = tuple[float, str]
"""Where an item stands in a list that is sorted by time: its time in Unix seconds, then its id."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobQuery:
    """Which jobs, newest first. Empty: whatever; `tenant` None: of every tenant. `after`: only those behind this place.
    `created_from` is included, `created_before` is not; in Unix seconds.
    """

    tenant: str | None = None
    states: Collection[JobState] = ()
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    model: str = ""
    created_from: float | None = None
    created_before: float | None = None
    after: Position | None = None
    limit: int = 50


def fits(record: JobRecord, query: JobQuery) -> bool:
    """Whether a job is one of those that are asked for, `after` included."""
    return (
        query.tenant in (None, record.tenant)
        and (not query.states or record.state in query.states)
        and query.model in ("", record.model)
        and (query.created_from is None or query.created_from <= record.create_time)
        and (query.created_before is None or record.create_time < query.created_before)
        and (query.after is None or place(record) < query.after)
        and query.labels.items() <= record.labels.items()
    )


def place(record: JobRecord) -> Position:
    """Where a job stands in a list."""
    return record.create_time, record.id
