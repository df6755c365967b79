"""Lists of jobs: every filter by an index in which the rows stand in the order of the page."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from omni_grpc.store.records import JobQuery, JobState
from omni_grpc.store.sql import rows, tables

jobs, labels = tables.jobs, tables.labels


def page(query: JobQuery) -> sa.Select[Any]:
    """The rows of a page, newest first. An index has each state's jobs in order: of several, the newest of each are
    merged.
    """
    states = _states(query)
    if query.labels or len(states) < 2:
        return _newest(query, states)
    each = [sa.select(_newest(query, [state]).subquery()) for state in states]
    merged = sa.union_all(*each).subquery()
    return sa.select(merged).order_by(merged.c.create_time.desc(), merged.c.id.desc()).limit(query.limit)


def count(query: JobQuery) -> sa.Select[Any]:
    source = _Source(query, _states(query))
    return sa.select(sa.func.count()).select_from(source.start).where(*source.conditions)


def _states(query: JobQuery) -> list[str]:
    """Empty: all."""
    states = sorted({state.value for state in query.states})
    return [] if len(states) == len(JobState) else states


def _newest(query: JobQuery, states: Collection[str]) -> sa.Select[Any]:
    source = _Source(query, states)
    place = source.time, source.key
    select = sa.select(*rows.RECORD).select_from(source.start).where(*source.conditions)
    if query.after is not None:
        select = select.where(sa.tuple_(*place) < sa.tuple_(*query.after))
    return select.order_by(*(column.desc() for column in place)).limit(query.limit)


class _Source:
    """Where the rows of a query come from, and what holds for them. `time` and `key` are the columns of their place.
    With labels, the rows of the first one lead to the jobs.
    """

    def __init__(self, query: JobQuery, states: Collection[str]) -> None:
        self.start: sa.FromClause = jobs
        self.time: sa.ColumnElement[float] = jobs.c.create_time
        self.key: sa.ColumnElement[str] = jobs.c.id
        tenant: sa.ColumnElement[str] = jobs.c.tenant
        self.conditions: list[sa.ColumnElement[bool]] = []
        if query.labels:
            self._from_labels(query)
            tenant = labels.c.tenant
        if query.tenant is not None:
            self.conditions.append(tenant == query.tenant)
        if len(states) == 1:
            self.conditions.append(jobs.c.state == next(iter(states)))
        elif states:
            self.conditions.append(jobs.c.state.in_(states))
        if query.model:
            self.conditions.append(jobs.c.model == query.model)
        if query.created_from is not None:
            self.conditions.append(self.time >= query.created_from)
        if query.created_before is not None:
            self.conditions.append(self.time < query.created_before)

    def _from_labels(self, query: JobQuery) -> None:
        (name, value), *others = query.labels.items()
        self.time, self.key = labels.c.create_time, labels.c.job_id
        self.start = labels.join(jobs, jobs.c.id == labels.c.job_id)
        self.conditions += [labels.c.name == name, labels.c.value == value]
        for other_name, other_value in others:
            other = labels.alias()
            same = [other.c[column] == labels.c[column] for column in ("tenant", "create_time", "job_id")]
            wanted = sa.exists().where(other.c.name == other_name, other.c.value == other_value, *same)
            self.conditions.append(wanted)
