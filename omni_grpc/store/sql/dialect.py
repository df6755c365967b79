"""What SQLite and PostgreSQL have alike, but SQLAlchemy for each alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite


def insert(connection: sa.Connection, table: sa.Table, found: Sequence[dict[str, Any]]) -> None:
    """Inserts rows; one whose key is there already stays as it is."""
    if found:
        connection.execute(_insert(connection, table).on_conflict_do_nothing(), found)


def replace(connection: sa.Connection, table: sa.Table, row: dict[str, Any]) -> None:
    """Inserts a row, in place of the one with its key."""
    statement = _insert(connection, table)
    key = [column.name for column in table.primary_key]
    others = {name: statement.excluded[name] for name in row if name not in key}
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=others), [row])


def _insert(connection: sa.Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)
