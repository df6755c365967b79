"""One batch of new jobs, new states and new events, in one transaction."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from omni_grpc.store.records import JobRecord, JobWrite, Rejected
from omni_grpc.store.sql import codec, rows, tables
from omni_grpc.store.sql.deliveries import delivery_row
from omni_grpc.store.sql.dialect import insert

jobs = tables.jobs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Encoded:
    record: JobRecord
    created: bool
    columns: dict[str, Any]
    events: list[dict[str, Any]]
    artifacts: list[dict[str, Any]]
    deliveries: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """What was there of a job."""

    server: str
    labels: str


class Batch:
    """Encoded before the transaction begins, so that this one is short.

    A write that is repeated does no harm: a job that is there already is updated, and events and outputs that are
    there stay. Its first try may have been committed although the reply was lost.
    """

    def __init__(self, writes: Sequence[JobWrite]) -> None:
        # all servers lock rows in the same order, so that none waits for another in a circle
        self._writes = [_encoded(write) for write in sorted(writes, key=_order)]

    def __call__(self, connection: sa.Connection) -> Rejected:
        known = self._known(connection)
        new, updated, lost = [], [], []
        for write in self._writes:
            there = known.get(write.record.id)
            if there is None and write.created:
                new.append(write)
            elif there is not None and there.server == write.record.server:
                updated.append(write)
            else:
                lost.append(write.record.id)
        taken = _create(connection, new)
        created = [write for write in new if write.record.id not in taken]
        _update(connection, updated, known)
        _beside(connection, created)
        written = created + updated
        insert(connection, tables.events, [row for write in written for row in write.events])
        insert(connection, tables.artifacts, [row for write in written for row in write.artifacts])
        insert(connection, tables.deliveries, [row for write in written for row in write.deliveries])
        return Rejected(taken=taken, lost=lost)

    def _known(self, connection: sa.Connection) -> dict[str, _Known]:
        """Of the jobs that are there. Their rows are locked until the end of the transaction."""
        found = {}
        for ids in rows.chunks([write.record.id for write in self._writes]):
            select = sa.select(jobs.c.id, jobs.c.server, jobs.c.labels).where(jobs.c.id.in_(ids))
            for row in connection.execute(select.order_by(jobs.c.id).with_for_update()):
                found[row.id] = _Known(row.server, row.labels)
        return found


def _order(write: JobWrite) -> tuple[str, str]:
    return write.record.tenant, write.record.request_id


def _encoded(write: JobWrite) -> _Encoded:
    record = write.record
    return _Encoded(
        record=record,
        created=write.created,
        columns=rows.job_columns(record) if write.created else rows.changing_columns(record),
        events=list(rows.event_rows(record.id, write.entries)),
        artifacts=[dataclasses.asdict(row) for row in write.artifacts],
        deliveries=[delivery_row(one) for one in write.deliveries],
    )


def _create(connection: sa.Connection, new: Sequence[_Encoded]) -> dict[str, str]:
    """Inserts new jobs; those whose request_id is another's, with the id of that."""
    insert(connection, jobs, [write.columns for write in new])
    asked = {(write.record.tenant, write.record.request_id) for write in new if write.record.request_id}
    owners = requested(connection, asked)
    return {
        write.record.id: owner
        for write in new
        if (owner := owners.get((write.record.tenant, write.record.request_id), write.record.id)) != write.record.id
    }


def requested(connection: sa.Connection, asked: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The ids of the jobs that were made with these request_ids, by tenant and request_id. It may say more than that of
    other tenants that are asked for.
    """
    owners: dict[tuple[str, str], str] = {}
    for some in rows.chunks(sorted({request_id for _, request_id in asked})):
        select = sa.select(jobs.c.tenant, jobs.c.request_id, jobs.c.id).where(
            jobs.c.tenant.in_(sorted({tenant for tenant, _ in asked})), jobs.c.request_id.in_(some), tables.REQUESTED
        )
        owners |= {(row.tenant, row.request_id): row.id for row in connection.execute(select)}
    return owners


def _update(connection: sa.Connection, updated: Sequence[_Encoded], known: dict[str, _Known]) -> None:
    if not updated:
        return
    changing: dict[str, sa.ColumnElement[Any]] = {
        name: sa.bindparam(f"new_{name}") for name in updated[0].columns if name not in ("id", "spec")
    }
    # who asked for its end may be another server than the one that has the job
    changing["cancel_reason"] = sa.func.coalesce(changing["cancel_reason"], jobs.c.cancel_reason)
    statement = sa.update(jobs).where(jobs.c.id == sa.bindparam("job")).values(changing)
    parameters = [
        {"job": write.record.id, **{f"new_{name}": value for name, value in write.columns.items() if name in changing}}
        for write in updated
    ]
    connection.execute(statement, parameters)
    relabelled = [write for write in updated if write.columns["labels"] != known[write.record.id].labels]
    for write in relabelled:
        before = codec.decode_labels(known[write.record.id].labels)
        delete_labels(connection, rows.label_rows(write.record, before))
        insert(connection, tables.labels, rows.label_rows(write.record, write.record.labels))


def _beside(connection: sa.Connection, created: Sequence[_Encoded]) -> None:
    """Rows of new jobs in other tables."""
    records = [write.record for write in created]
    insert(connection, tables.labels, [row for record in records for row in rows.label_rows(record, record.labels)])
    kept = {(record.id, one.blob) for record in records for one in record.spec.inputs}
    insert(connection, tables.inputs, [{"job_id": job_id, "blob": blob} for job_id, blob in sorted(kept)])


def delete_labels(connection: sa.Connection, found: Sequence[dict[str, Any]]) -> None:
    """Deletes rows of labels by their whole key: an index by job would cost every job that has labels."""
    if found:
        key = sa.and_(*(column == sa.bindparam(f"old_{column.name}") for column in tables.labels.c))
        parameters = [{f"old_{name}": value for name, value in row.items()} for row in found]
        connection.execute(sa.delete(tables.labels).where(key), parameters)
