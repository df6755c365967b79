"""The seam between what a server keeps and where it keeps it. `tests/store/conformance.py` says what every
implementation does.

A `Store` keeps rows: jobs with their logs, what is known of outputs and uploads, adapters that were loaded, and
webhooks that are owed. `Blobs` keep bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from omni_grpc.store.records import (
    AdapterRow,
    ArtifactRow,
    Asset,
    Cause,
    Counts,
    Delivery,
    Entry,
    JobQuery,
    JobRecord,
    JobWrite,
    Position,
    Rejected,
    StoredJob,
)

T = TypeVar("T")


class StoreError(Exception):
    """The store cannot do it now: it is full, read-only or away. Its text says what is wrong and how to mend it,
    without addresses or passwords. `retryable`: it may pass by itself.
    """

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class MissingBlob(Exception):
    """There is no blob of this name."""


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError("it waits for something")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What one server tells the others, of one job. Nothing is lost with a notice that does not arrive: whoever waits
    for it looks at the rows too, every few seconds.

    `watched`: somebody watches it at the server that says so. `seq`: events up to this one are committed. `progress`: a
    step, which is not kept, behind the kept event `seq`. `cancel`: somebody asked for its end. `gone`: it was deleted.
    `adapters`: of no job, with an empty id: the rows of adapters have changed.
    """

    job_id: str
    seq: int = 0
    progress: Entry | None = None
    cancel: bool = False
    gone: bool = False
    watched: bool = False
    adapters: bool = False


class JobRows(Protocol):
    """Jobs and their logs."""

    async def write(self, writes: Sequence[JobWrite]) -> Rejected:
        """Commits everything that it does not reject, in one transaction: when it returns, a crash of this process, of
        the database or of the machine loses none of it. At most one write per job. A record that says no
        `cancel_reason` leaves the one that is there.

        After a StoreError it may have been committed or not, so it can be repeated: a job that its server has created
        already is updated, and entries and outputs that are there stay as they are.
        """

    async def read(self, job_ids: Sequence[str]) -> list[StoredJob]:
        """The jobs of these ids in their order; those that there are not are left out."""

    async def entries(self, job_id: str, after_seq: int = 0) -> list[Entry]:
        """The kept events of a job with a greater seq, in order."""

    async def find(self, tenant: str, request_id: str) -> str | None:
        """The id of the job that a tenant made with this request_id."""

    async def page(self, query: JobQuery) -> list[StoredJob]:
        """The jobs that fit, newest first (by create_time, then id), at most `limit`."""

    async def count(self, query: JobQuery) -> int:
        """The number of jobs that fit, whatever `limit` and `after` say."""

    async def unfinished(self, server: str) -> list[str]:
        """The ids of a server's jobs that have not ended, in order of creation."""

    async def queued_before(self, job: JobRecord) -> int:
        """The number of jobs of the same model that wait on other servers and leave the queue before this one: of a
        higher priority, or of the same and created earlier.
        """

    async def request_cancel(self, job_id: str, reason: str) -> JobRecord | None:
        """Writes down that a job is to be stopped, unless it has ended or somebody has asked before. The record as it
        is then; None without such a job.
        """

    async def cancelled(self, server: str) -> list[tuple[str, str]]:
        """Ids and reasons of a server's jobs that have not ended and are to be stopped."""

    async def delete(self, job_ids: Collection[str], cause: Cause) -> list[str]:
        """Forgets jobs with their logs and the rows of their outputs, and remembers their names. Returns the names of
        the blobs that are nobody's now: outputs and kept inputs that no other row names. Unknown ids are passed over.
        """

    async def expired(self, now: float, limit: int) -> list[str]:
        """The ids of jobs whose expire_time has come, the earliest first."""

    async def oldest(self, tenant: str, limit: int) -> list[str]:
        """The ids of a tenant's jobs that have ended and have outputs, in the order in which they ended."""


class FileRows(Protocol):
    """Rows of outputs and uploads. An output's row comes with the `JobWrite` that announces it."""

    async def artifact(self, artifact_id: str) -> ArtifactRow | None: ...

    async def artifacts(
        self, *, tenant: str | None = None, job_id: str = "", after: Position | None = None, limit: int = 50
    ) -> list[ArtifactRow]:
        """Outputs whose bytes are there, newest first (by create_time, then id)."""

    async def delete_artifact(self, artifact_id: str, cause: Cause) -> bool:
        """Whether it was there: of several who delete it at once, one is told so."""

    async def artifact_bytes(self) -> Mapping[str, int]:
        """Bytes of outputs by tenant."""

    async def put_asset(self, asset: Asset) -> None: ...

    async def asset(self, asset_id: str) -> Asset | None: ...

    async def touch_asset(self, asset_id: str, expire_time: float) -> None:
        """Moves the expiry of an upload."""

    async def delete_asset(self, asset_id: str, cause: Cause) -> bool:
        """As `delete_artifact`."""

    async def expired_assets(self, now: float, limit: int) -> list[str]:
        """The ids of uploads whose expire_time has come, the earliest first."""

    async def asset_bytes(self) -> Mapping[str, int]:
        """Bytes of uploads by tenant."""

    async def cause(self, name: str) -> tuple[Cause, str] | None:
        """Why a job, an output or an upload of this name is gone, and whose it was. None where it is not remembered."""

    async def forget_names(self, before: float) -> None:
        """Forgets the names of what went before this time (Unix seconds)."""

    async def owned(self, blobs: Sequence[str]) -> set[str]:
        """Those of these blobs that a row names: outputs, uploads, inputs of jobs."""


class AdapterRows(Protocol):
    """LoRA adapters that were loaded while a server ran, at most one of each id for a model."""

    async def add(self, row: AdapterRow) -> AdapterRow:
        """Keeps an adapter. Where there is one of its model and id, that one stays, and is returned."""

    async def all(self) -> list[AdapterRow]:
        """Of every model, in order of creation."""

    async def delete(self, row: AdapterRow) -> bool:
        """Whether it was there, under this uid."""


class Deliveries(Protocol):
    """Calls of webhooks that are owed. A delivery comes with the `JobWrite` of the event that it tells of, in the same
    transaction; one with an id that is known is passed over, since that was told of already. It does not go with its
    job.

    Whoever makes an attempt claims the delivery before, so that no two do it at the same time. A claim holds until a
    time: then others may have what a lost server has claimed.
    """

    async def hosts(self, now: float) -> list[str]:
        """Hosts for which there is something to claim, the one that waits longest first."""

    async def claim(self, host: str, now: float, *, owner: str, until: float, limit: int) -> list[Delivery]:
        """Gives this owner what is due of a host and claimed by nobody, the longest due first, until that time."""

    async def release(self, owner: str = "") -> None:
        """Ends the claims of an owner; of every one where none is named."""

    async def done(self, delivery_id: str, now: float, attempts: int) -> None:
        """It has been delivered, whoever has claimed it meanwhile."""

    async def retry(self, delivery_id: str, due: float, attempts: int, error: str, *, owner: str) -> None:
        """An attempt failed, and another one is due then. Changes nothing unless the claim is still this owner's."""

    async def give_up(self, delivery_id: str, now: float, attempts: int, error: str, *, owner: str) -> None:
        """No more attempts. Changes nothing unless the claim is still this owner's."""

    async def of(self, job_id: str) -> list[Delivery]:
        """Those of a job, in order of creation; the ended ones too, without what was sent."""

    async def forget(self, before: float) -> None:
        """Forgets those that ended before this time."""


class Servers(Protocol):
    """Several servers on one store: who is alive, who has which job, and what they tell each other."""

    async def now(self) -> float:
        """The time (Unix seconds) by which all servers on this store go, whatever the clocks of their machines say."""

    async def beat(self, server: str, now: float, until: float) -> bool:
        """Says that a server is alive until then. False: it was not known, at first, or since its time had run out and
        others have taken its jobs. From now on it is.
        """

    async def leave(self, server: str) -> None:
        """A server ends: whatever it has may be taken at once."""

    async def take_over(self, server: str, now: float, *, models: Collection[str] = ()) -> list[str]:
        """Gives this server the unfinished jobs (of this model, if one is named) of all servers whose time has run out
        or that never beat, and counts one more restart in each. Their ids in order of creation. Two servers that do
        this at once share them out. So a server beats before it writes its first job.
        """

    async def alive(self, now: float) -> list[str]:
        """Servers whose time has not run out."""

    def listen(self, hear: Callable[[Notice], None]) -> None:
        """Calls `hear` on the loop with what other servers tell, from now on."""

    async def tell(self, notices: Sequence[Notice]) -> None:
        """Tells the other servers. Returns when it is sent."""


class Store(Protocol):
    """Where rows are kept. Every call raises StoreError where it cannot be done."""

    @property
    def durable(self) -> bool:
        """Whether it outlives the process."""

    @property
    def immediate(self) -> bool:
        """Whether its coroutines wait for nothing, so that `at_once` can run them."""

    @property
    def shared(self) -> bool:
        """Whether several servers can use it at the same time."""

    @property
    def kind(self) -> str:
        """What it is, as callers are told: "memory", "sqlite" or "postgresql"."""

    @property
    def name(self) -> str:
        """What it is, for people: without passwords."""

    @property
    def jobs(self) -> JobRows: ...

    @property
    def files(self) -> FileRows: ...

    @property
    def servers(self) -> Servers: ...

    @property
    def deliveries(self) -> Deliveries: ...

    @property
    def adapters(self) -> AdapterRows: ...

    async def open(self) -> None:
        """Connects, and brings the tables to this version. Raises ConfigError where it cannot be used as it is: a newer
        version's, or in use by another server where it is not `shared`.
        """

    async def close(self) -> None: ...

    async def counts(self) -> Counts:
        """How much there is of what. It may take as long as reading an index of each table."""


class Blobs(Protocol):
    """Where bytes are kept, by name: letters, digits, `._-` and `/` between them. Every call raises StoreError where it
    cannot be done.
    """

    @property
    def durable(self) -> bool:
        """Whether they outlive the process."""

    @property
    def kind(self) -> str:
        """Where they are, as callers are told: "memory", "folder" or "s3"."""

    @property
    def immediate(self) -> bool:
        """Whether its coroutines wait for nothing but what they are given."""

    @property
    def signs(self) -> bool:
        """Whether there are addresses, as `signed_url` makes them."""

    async def open(self) -> None:
        """Gets ready, and makes sure that it can write. Raises ConfigError where it cannot."""

    async def close(self) -> None: ...

    async def put(self, name: str, pieces: AsyncIterable[bytes]) -> int:
        """Keeps what the pieces are together, and returns its size. Nobody sees a part of it: when this returns it is
        complete and outlives a crash; when it raises, or is cancelled, there is nothing. One of the same name is
        replaced.
        """

    def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """The bytes from `start` until before `end`, in pieces of at most a MiB. Raises MissingBlob."""

    async def delete(self, names: Collection[str]) -> None:
        """Those that there are not are passed over."""

    def names(self, prefix: str, before: float) -> AsyncIterator[str]:
        """The names that begin so, of what was put before this time (Unix seconds)."""

    async def signed_url(self, name: str, seconds: float, *, mime_type: str = "", filename: str = "") -> str | None:
        """An address at which anybody can get it for so long; None where there are no such addresses."""
