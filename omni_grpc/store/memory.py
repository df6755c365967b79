"""A store in this process: what it keeps is gone with it."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Mapping, Sequence

from omni_grpc.store.memory_adapters import MemoryAdapters
from omni_grpc.store.memory_deliveries import MemoryDeliveries
from omni_grpc.store.records import (
    ArtifactRow,
    Asset,
    Cause,
    Counts,
    Entry,
    JobQuery,
    JobRecord,
    JobState,
    JobWrite,
    Position,
    Rejected,
    StoredJob,
    fits,
    place,
)
from omni_grpc.store.seam import MissingBlob, Notice

REMEMBERED = 1 << 14
"""Names of what is gone that are remembered, the newest: about 3.4 MB."""
PIECE_BYTES = 1 << 20
"""Most bytes of a blob in one piece."""


class MemoryStore:
    """Rows in dictionaries. It implements `omni_grpc.store.seam.Store`."""

    durable = False
    immediate = True
    shared = False
    kind = name = "memory"

    def __init__(self, remembered: int = REMEMBERED) -> None:
        names = Names(remembered)
        self.deliveries = MemoryDeliveries()
        self.jobs = MemoryJobs(names, self.deliveries)
        self.files = MemoryFiles(self.jobs, names)
        self.servers = MemoryServers(self.jobs)
        self.adapters = MemoryAdapters()

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def counts(self) -> Counts:
        jobs = self.jobs
        return Counts(
            jobs=jobs.total, artifacts=len(jobs.artifacts), assets=len(jobs.assets), owed=self.deliveries.owed
        )


class Names:
    """The names of what is gone, why, whose it was, and since when."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._gone: dict[str, tuple[Cause, str, float]] = {}

    def add(self, name: str, cause: Cause, tenant: str) -> None:
        self._gone.setdefault(name, (cause, tenant, time.time()))
        if len(self._gone) > self._capacity:
            del self._gone[next(iter(self._gone))]

    def get(self, name: str) -> tuple[Cause, str] | None:
        found = self._gone.get(name)
        return None if found is None else found[:2]

    def forget(self, before: float) -> None:
        for name in [name for name, (_, _, since) in self._gone.items() if since < before]:
            del self._gone[name]


class MemoryJobs:
    """Jobs by id."""

    def __init__(self, names: Names, deliveries: MemoryDeliveries) -> None:
        self._names = names
        self._deliveries = deliveries
        self._records: dict[str, JobRecord] = {}
        self._logs: dict[str, list[Entry]] = collections.defaultdict(list)
        self._by_request_id: dict[tuple[str, str], str] = {}
        self._inputs: collections.Counter[str] = collections.Counter()
        """Blobs that jobs have as inputs, and how often."""
        self.artifacts: dict[str, ArtifactRow] = {}
        self.assets: dict[str, Asset] = {}

    @property
    def total(self) -> int:
        """All that there are, of any state."""
        return len(self._records)

    async def write(self, writes: Sequence[JobWrite]) -> Rejected:
        taken, lost = {}, []
        for write in writes:
            record = write.record
            key = (record.tenant, record.request_id)
            before = self._records.get(record.id)
            if before is None and write.created and record.request_id and key in self._by_request_id:
                taken[record.id] = self._by_request_id[key]
                continue
            if before.server != record.server if before is not None else not write.created:
                lost.append(record.id)
                continue
            if before is None:
                self._inputs.update(kept.blob for kept in record.spec.inputs)
                if record.request_id:
                    self._by_request_id[key] = record.id
            elif record.cancel_reason is None:
                record = dataclasses.replace(record, cancel_reason=before.cancel_reason)
            self._records[record.id] = record
            log = self._logs[record.id]
            newest = log[-1].seq if log else 0
            log += [entry for entry in write.entries if entry.seq > newest]
            self.artifacts |= {row.artifact_id: row for row in write.artifacts}
            self._deliveries.add(write.deliveries)
        return Rejected(taken=taken, lost=lost)

    async def read(self, job_ids: Sequence[str]) -> list[StoredJob]:
        return [self._stored(self._records[job_id]) for job_id in job_ids if job_id in self._records]

    async def entries(self, job_id: str, after_seq: int = 0) -> list[Entry]:
        return [entry for entry in self._logs.get(job_id, ()) if entry.seq > after_seq]

    async def find(self, tenant: str, request_id: str) -> str | None:
        return self._by_request_id.get((tenant, request_id))

    async def page(self, query: JobQuery) -> list[StoredJob]:
        found = sorted((record for record in self._records.values() if fits(record, query)), key=place, reverse=True)
        return [self._stored(record) for record in found[: query.limit]]

    async def count(self, query: JobQuery) -> int:
        every = dataclasses.replace(query, after=None)
        return sum(fits(record, every) for record in self._records.values())

    async def unfinished(self, server: str) -> list[str]:
        return [record.id for record in self._unfinished() if record.server == server]

    async def queued_before(self, job: JobRecord) -> int:
        return sum(
            record.state is JobState.QUEUED
            and (record.model, record.server != job.server) == (job.model, True)
            and (-record.priority, record.create_time) < (-job.priority, job.create_time)
            for record in self._records.values()
        )

    async def request_cancel(self, job_id: str, reason: str) -> JobRecord | None:
        record = self._records.get(job_id)
        if record is not None and record.cancel_reason is None and not record.state.terminal:
            record = self._records[job_id] = dataclasses.replace(record, cancel_reason=reason)
        return record

    async def cancelled(self, server: str) -> list[tuple[str, str]]:
        return [
            (record.id, record.cancel_reason)
            for record in self._unfinished()
            if record.server == server and record.cancel_reason is not None
        ]

    async def delete(self, job_ids: Collection[str], cause: Cause) -> list[str]:
        blobs = []
        for record in [self._records.pop(job_id) for job_id in job_ids if job_id in self._records]:
            self._logs.pop(record.id, None)
            self._names.add(record.id, cause, record.tenant)
            if self._by_request_id.get(key := (record.tenant, record.request_id)) == record.id:
                del self._by_request_id[key]
            outputs = [row.artifact_id for row in self.artifacts.values() if row.job_id == record.id]
            for artifact_id in outputs:
                del self.artifacts[artifact_id]
                self._names.add(artifact_id, cause, record.tenant)
            inputs = [kept.blob for kept in record.spec.inputs]
            self._inputs.subtract(inputs)
            blobs += [*outputs, *inputs]
        self._inputs += collections.Counter()  # without those that nobody has now
        return list(dict.fromkeys(blob for blob in blobs if not self.owns(blob)))

    async def expired(self, now: float, limit: int) -> list[str]:
        due = [record for record in self._records.values() if record.expire_time is not None]
        due = sorted((one for one in due if (one.expire_time or 0) <= now), key=lambda one: one.expire_time or 0)
        return [record.id for record in due[:limit]]

    async def oldest(self, tenant: str, limit: int) -> list[str]:
        have = {row.job_id for row in self.artifacts.values() if row.tenant == tenant}
        ended = [self._records[job_id] for job_id in have if self._records[job_id].end_time is not None]
        return [record.id for record in sorted(ended, key=lambda one: one.end_time or 0)[:limit]]

    def take_over(self, server: str, alive: Collection[str], models: Collection[str] = ()) -> list[str]:
        """Gives `server` what all but these have."""
        gone = [record for record in self._unfinished() if record.server not in alive]
        taken = [record for record in gone if not models or record.model in models]
        for record in taken:
            self._records[record.id] = dataclasses.replace(record, server=server, restarts=record.restarts + 1)
        return [record.id for record in taken]

    def owns(self, blob: str) -> bool:
        """Whether a row names it."""
        return blob in self.artifacts or blob in self.assets or blob in self._inputs

    def _stored(self, record: JobRecord) -> StoredJob:
        return StoredJob(record, tuple(self._logs.get(record.id, ())))

    def _unfinished(self) -> list[JobRecord]:
        return sorted((record for record in self._records.values() if not record.state.terminal), key=place)


class MemoryFiles:
    """Rows of outputs and uploads."""

    def __init__(self, jobs: MemoryJobs, names: Names) -> None:
        self._jobs = jobs
        self._names = names
        self._assets = jobs.assets

    async def artifact(self, artifact_id: str) -> ArtifactRow | None:
        return self._jobs.artifacts.get(artifact_id)

    async def artifacts(
        self, *, tenant: str | None = None, job_id: str = "", after: Position | None = None, limit: int = 50
    ) -> list[ArtifactRow]:
        found = [
            row
            for row in self._jobs.artifacts.values()
            if tenant in (None, row.tenant)
            and job_id in ("", row.job_id)
            and (after is None or (row.create_time, row.artifact_id) < after)
        ]
        return sorted(found, key=lambda row: (row.create_time, row.artifact_id), reverse=True)[:limit]

    async def delete_artifact(self, artifact_id: str, cause: Cause) -> bool:
        if (row := self._jobs.artifacts.pop(artifact_id, None)) is not None:
            self._names.add(artifact_id, cause, row.tenant)
        return row is not None

    async def artifact_bytes(self) -> Mapping[str, int]:
        return _by_tenant(self._jobs.artifacts.values())

    async def put_asset(self, asset: Asset) -> None:
        self._assets[asset.id] = asset

    async def asset(self, asset_id: str) -> Asset | None:
        return self._assets.get(asset_id)

    async def touch_asset(self, asset_id: str, expire_time: float) -> None:
        if (asset := self._assets.get(asset_id)) is not None:
            self._assets[asset_id] = dataclasses.replace(asset, expire_time=expire_time)

    async def delete_asset(self, asset_id: str, cause: Cause) -> bool:
        if (asset := self._assets.pop(asset_id, None)) is not None:
            self._names.add(asset_id, cause, asset.tenant)
        return asset is not None

    async def expired_assets(self, now: float, limit: int) -> list[str]:
        due = [asset for asset in self._assets.values() if asset.expire_time <= now]
        return [asset.id for asset in sorted(due, key=lambda asset: asset.expire_time)[:limit]]

    async def asset_bytes(self) -> Mapping[str, int]:
        return _by_tenant(self._assets.values())

    async def cause(self, name: str) -> tuple[Cause, str] | None:
        return self._names.get(name)

    async def forget_names(self, before: float) -> None:
        self._names.forget(before)

    async def owned(self, blobs: Sequence[str]) -> set[str]:
        return {blob for blob in blobs if self._jobs.owns(blob)}


def _by_tenant(rows: Collection[ArtifactRow] | Collection[Asset]) -> Mapping[str, int]:
    held: collections.Counter[str] = collections.Counter()
    for row in rows:
        held[row.tenant] += row.size_bytes
    return held


class MemoryServers:
    """The servers of a store that only one process can reach: the rules are those of the others."""

    def __init__(self, jobs: MemoryJobs) -> None:
        self._jobs = jobs
        self._until: dict[str, float] = {}
        self._listeners: list[Callable[[Notice], None]] = []

    async def now(self) -> float:
        return time.time()

    async def beat(self, server: str, now: float, until: float) -> bool:
        known = server in self._until
        self._until[server] = until
        return known

    async def leave(self, server: str) -> None:
        self._until[server] = float("-inf")

    async def take_over(self, server: str, now: float, *, models: Collection[str] = ()) -> list[str]:
        dead = {name for name, until in self._until.items() if until < now and name != server}
        for name in dead:
            del self._until[name]
        return self._jobs.take_over(server, {*self._until, server}, models)

    async def alive(self, now: float) -> list[str]:
        return sorted(name for name, until in self._until.items() if until >= now)

    def listen(self, hear: Callable[[Notice], None]) -> None:
        self._listeners.append(hear)

    async def tell(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            for hear in self._listeners:
                hear(notice)


class MemoryBlobs:
    """Bytes in a dictionary. It implements `omni_grpc.store.seam.Blobs`."""

    durable = False
    immediate = True
    kind = "memory"
    signs = False

    def __init__(self) -> None:
        self._blobs: dict[str, tuple[bytes, float]] = {}

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def put(self, name: str, pieces: AsyncIterable[bytes]) -> int:
        found = [piece async for piece in pieces]
        # of a single piece no copy is made
        data = found[0] if len(found) == 1 else b"".join(found)
        self._blobs[name] = data, time.time()
        return len(data)

    async def read(self, name: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        if name not in self._blobs:
            raise MissingBlob(name)
        data, _ = self._blobs[name]
        end = len(data) if end is None else min(end, len(data))
        for at in range(start, end, PIECE_BYTES):
            yield data[at : min(at + PIECE_BYTES, end)]

    async def delete(self, names: Collection[str]) -> None:
        for name in names:
            self._blobs.pop(name, None)

    async def names(self, prefix: str, before: float) -> AsyncIterator[str]:
        for name in [name for name, (_, when) in self._blobs.items() if name.startswith(prefix) and when < before]:
            yield name

    async def signed_url(self, name: str, seconds: float, *, mime_type: str = "", filename: str = "") -> str | None:
        return None
