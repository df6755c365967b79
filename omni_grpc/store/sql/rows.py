"""Records as rows and back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from omni_grpc.store.records import ArtifactRow, Asset, Entry, JobRecord, JobState
from omni_grpc.store.sql import codec, tables

T = TypeVar("T")

CHUNK = 500
"""Most values of one IN."""
RECORD = tuple(column for column in tables.jobs.c if column.name != "ended")
SAME = tuple(column.name for column in RECORD if column.name not in ("labels", "spec", "state"))
"""Columns that hold a field of JobRecord as it is."""

logger = logging.getLogger(__name__)


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for at in range(0, len(values), CHUNK):
        yield values[at : at + CHUNK]


def changing_columns(record: JobRecord) -> dict[str, Any]:
    """What an update writes: all but the spec, which never changes."""
    columns: dict[str, Any] = {name: getattr(record, name) for name in SAME}
    return columns | {
        "state": record.state.value,
        "ended": int(record.state.terminal),
        "labels": codec.encode_labels(record.labels),
    }


def job_columns(record: JobRecord) -> dict[str, Any]:
    return changing_columns(record) | {"spec": codec.encode_spec(record.spec)}


def job_record(row: sa.RowMapping) -> JobRecord:
    """Raises codec.Unreadable."""
    return JobRecord(
        **{name: row[name] for name in SAME},
        state=JobState(row["state"]),
        labels=codec.decode_labels(row["labels"]),
        spec=codec.decode_spec(row["spec"]),
    )


def label_rows(record: JobRecord, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    key = {"tenant": record.tenant, "create_time": record.create_time, "job_id": record.id}
    return [{**key, "name": name, "value": value} for name, value in labels.items()]


def event_rows(job_id: str, entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        kind, body = codec.encode_event(entry.event)
        yield {"job_id": job_id, "seq": entry.seq, "time": entry.time, "kind": kind, "body": body}


def entries(rows: Iterable[sa.Row[Any]]) -> Iterator[Entry]:
    """Of rows with seq, time, kind and body. Those that cannot be read are left out, and the log says so."""
    for row in rows:
        try:
            yield Entry(row.seq, row.time, codec.decode_event(row.kind, row.body))
        except codec.Unreadable as error:
            logger.error("job %s: event %d is left out: %s", row.job_id, row.seq, error)


def artifact(row: sa.Row[Any]) -> ArtifactRow:
    return ArtifactRow(**row._mapping)


def asset(row: sa.Row[Any]) -> Asset:
    return Asset(**row._mapping)
